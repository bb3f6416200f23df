# SPDX-License-Identifier: Apache-2.0
"""`deltaserve verify`: a cluster's answers against those of one aggregated engine with the same weights."""
