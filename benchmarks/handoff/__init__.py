# SPDX-License-Identifier: Apache-2.0
"""What the handoff costs: from the end of a prefill's last kernel to the start of a decode's first step.

`python -m benchmarks.handoff --json FILE [--quick]` measures the store path without an engine: two processes with
caches as vLLM lays them out, a real Mooncake master between them and a real etcd. In the same run, taking turns, the
same bytes go through Mooncake's own batch put and get, from registered memory into registered memory, over the same
transport, into memory that the reader lends: *bare*. `--cluster` measures whole requests of a running or started
cluster instead.

shapes.py says which state moves, sides.py what publisher and reader do with it, bare.py what is compared with,
processes.py runs the two, memory.py measures what memory and digests can do here, table.py prints.
"""
