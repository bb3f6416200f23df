# SPDX-License-Identifier: Apache-2.0
"""What the cluster tests share: clusters, calls to them, and a look into what they hold."""

from __future__ import annotations

from tests.support.cluster import cluster, make_real_cluster

__all__ = ["cluster", "make_real_cluster"]
