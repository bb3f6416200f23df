# SPDX-License-Identifier: Apache-2.0
"""Running a cluster elsewhere than under `deltaserve up`."""
