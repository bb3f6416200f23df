# SPDX-License-Identifier: Apache-2.0
"""A whole cluster on one machine: `deltaserve up`, and `Cluster` for programs and tests.

cluster.py     the public API: start, stop, endpoint, pids, logs, kill, restart
supervisor.py  the thread that starts, watches and restarts the processes
process.py     one child: its log, its stages, its end
launcher.py    what a child runs before it becomes the role: dies with its parent
reaper.py      every process of a cluster, and the guard that ends what a killed supervisor left
plan.py        configuration → the processes, in starting order
caches.py      where compiled kernels are kept
binaries.py    etcd and mooncake_master: where, and which versions are refused
ports.py       free ports, and who holds a taken one
display.py     stages on a terminal or as lines
"""

from deltaserve.up.cluster import Cluster
from deltaserve.up.errors import ClusterError

__all__ = ["Cluster", "ClusterError"]
