# SPDX-License-Identifier: Apache-2.0
"""The decode role: restores a committed boundary, computes token N and what follows."""
