# SPDX-License-Identifier: Apache-2.0
"""The prefill role: computes the first N-1 tokens of a prompt and publishes the state after them as a boundary."""
