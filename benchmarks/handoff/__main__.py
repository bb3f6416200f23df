# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.handoff`; see the package's description."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.handoff.shapes import LAYERS
from statestore.connector.faults import FOUND

TURNS = {1: 60, 8: 40, 64: 15}
QUICK_TURNS = {1: 10, 8: 6, 64: 3}
"""By MiB of state."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=__doc__)
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    made.add_argument("--quick", action="store_true", help="few turns: a look, not a measurement")
    made.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        choices=sorted(LAYERS),
        default=sorted(LAYERS),
        metavar="MIB",
        help="MiB of state (default: 1 8 64)",
    )
    made.add_argument("--turns", type=int, metavar="N", help="handoffs of every size (default: by size)")
    made.add_argument(
        "--damage",
        choices=("none", *FOUND),
        default="none",
        help="break the state before it is read (negative control: the run must fail)",
    )
    made.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the caches are; on cuda both ranks share the first GPU (not with --cluster)",
    )
    made.add_argument(
        "--pass-ms",
        type=float,
        default=0.0,
        metavar="N",
        help="before the clock begins, tell of the layers one after the other for so long, as a prefill pass does: "
        "parts may leave meanwhile (docs/layer_streams.md; not with --cluster)",
    )
    made.add_argument(
        "--cluster",
        nargs="?",
        const="start",
        metavar="URL",
        help="measure whole requests instead: of the cluster at URL, or of one started for it",
    )
    made.add_argument(
        "--no-checkpoints",
        action="store_true",
        help="with --cluster: start one whose prefill leaves no checkpoints, and computes in larger steps",
    )
    made.add_argument(
        "--early-reads",
        action="store_true",
        help="with --cluster: start one that reads boundaries beside their commit",
    )
    return made


def turns_of(options: argparse.Namespace, mib: int) -> int:
    """How many handoffs of a size."""
    if options.turns is not None:
        return int(options.turns)
    return (QUICK_TURNS if options.quick else TURNS)[mib]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 when a handoff failed or was not exact."""
    made = parser()
    options = made.parse_args(arguments)
    if options.turns is not None and options.turns < 1:
        made.error(f"--turns: {options.turns} must be at least 1")
    for name in ("no_checkpoints", "early_reads"):
        if getattr(options, name) and options.cluster != "start":
            made.error(
                f"--{name.replace('_', '-')}: only a cluster that is started for it can be told; use --cluster without "
                "a URL"
            )
    if options.pass_ms < 0 or (options.pass_ms and options.cluster is not None):
        made.error(f"--pass-ms: {options.pass_ms:g} must be at least 0, and a cluster has passes of its own")
    if options.cluster is not None and options.device != "cpu":
        made.error("--device: a cluster has its own (deltaserve up --device)")
    if options.cluster is not None:
        from benchmarks.handoff.cluster import run_cluster

        document = run_cluster(
            options.cluster, options.quick, not options.no_checkpoints, options.early_reads
        )
    else:
        # Threads that spin between two parallel loops take the cores from the other side.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        found = store_path(options)
        if found is None:
            return 1
        document = found
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


def store_path(options: argparse.Namespace) -> dict[str, Any] | None:
    """The store path without an engine, printed; None when it failed."""
    from benchmarks.handoff import memory, processes, table

    speeds = memory.measure()
    copy, read = speeds["copy"]["median"], speeds["read"]["median"]
    results = []
    try:
        with (
            processes.started_services() as places,
            processes.Run(places, options.damage, options.device, options.pass_ms / 1e3) as run,
        ):
            for mib in options.sizes:
                results.append(run.size(mib, turns_of(options, mib)))
                one = results[-1]
                print(
                    f"{mib} MiB: {one.ratio:.2f} x bare, read beside the commit {one.early_ratio:.2f}",
                    file=sys.stderr,
                    flush=True,
                )
    except processes.RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return None
    host = memory.machine()
    host["device"] = options.device
    if options.device == "cuda":
        import torch

        host["device"] = torch.cuda.get_device_name()
    behind = f", each handoff behind a pass of {options.pass_ms:g} ms" if options.pass_ms else ""
    host["pass_ms"] = options.pass_ms
    print(
        f"{host['cpu']}, {host['cores']} cores, load {host['load'][0]:.1f}, caches on {host['device']}{behind}\n"
    )
    print(
        table.render(
            ("GB/s", "median", "best"),
            [(name, f"{s['median'] / 1e9:.1f}", f"{s['best'] / 1e9:.1f}") for name, s in speeds.items()],
        )
    )
    print()
    print(table.handoff_table(results, copy, read))
    return {
        "machine": host,
        "bytes_a_second": speeds,
        "sizes": [result.to_dict(copy, read) for result in results],
    }


if __name__ == "__main__":
    sys.exit(main())
