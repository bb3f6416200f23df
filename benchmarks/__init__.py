# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: each prints a table, and measures a peer in the same run to compare with. Run from a checkout."""
