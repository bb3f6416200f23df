# SPDX-License-Identifier: Apache-2.0
"""Replicas a role under changing load: traces, a simulator of the two pools, and baselines to beat. docs/scaling.md."""
