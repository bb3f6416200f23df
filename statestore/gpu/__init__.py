# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that copy a rank's shards between paged caches and staging on the device; docs/gpu.md has the bytes.

kernels.py has them, launch.py calls them for one rank's caches. Only workers whose caches are on a GPU import either.
"""
