# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.copies [--parts check,kernels,...] [--json FILE]`: needs one GPU, takes about a minute."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

HEADS, KDA_LAYERS, MLA_LAYERS = 24, 69, 24
"""A rank of Kimi K3 at TP4: 112 MB of KDA state, 27,648 bytes of latent rows a token."""
TOKENS = 32768

SWEEP = ((1024, 8, 4), (1024, 32, 8), (512, 8, 2), (1024, 32, 4), (1024, 16, 8))
"""Words of state and latent rows of one program, and its warps."""

PARTS = ("check", "bandwidth", "kernels", "sweep", "transfers", "decode")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.copies", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--json", default="", help="file that the numbers are written to as well")
    arguments = parser.parse_args()
    chosen = arguments.parts.split(",")
    if unknown := [part for part in chosen if part not in PARTS]:
        parser.error(f"--parts: {', '.join(unknown)}: unknown; choose from {', '.join(PARTS)}")
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device is visible; these kernels run on NVIDIA GPUs", file=sys.stderr)
        return 2
    print(torch.cuda.get_device_name(0), "torch", torch.__version__, flush=True)
    results: dict[str, Any] = {}
    failed = False
    for part in chosen:
        print(f"\n## {part}", flush=True)
        try:
            results[part] = _PARTS[part]()
        except Exception:
            # The other parts are still worth their numbers.
            traceback.print_exc()
            failed = True
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)
    failed = failed or any(text != "ok" for text in results.get("check", {}).values())
    return 1 if failed else 0


def _check() -> dict[str, str]:
    from benchmarks.copies.checks import check_all

    results = {}
    for what, text in check_all("cuda"):
        results[what] = text
        print(f"{what}: {text}", flush=True)
    return results


def _show(row: Any, copy: float | None = None, note: str = "") -> float:
    share = f"{row.rate / copy:6.1%} of copy" if copy else ""
    print(
        f"{row.what:28s} {row.nbytes / 1e6:8.1f} MB {row.milliseconds:8.3f} ms {row.rate / 1e9:7.0f} GB/s "
        f"{share} {note}",
        flush=True,
    )
    return float(row.rate)


def _bandwidth() -> dict[str, float]:
    from benchmarks.copies import timing

    rows = [*timing.host_bandwidth(), *(timing.plain_copy(size << 20) for size in (64, 256, 1024))]
    return {f"{row.what} {row.nbytes}": _show(row) for row in rows}


def _kernels() -> dict[str, float]:
    import torch

    from benchmarks.copies import timing
    from benchmarks.copies.caches import Caches, geometry
    from statestore.gpu.launch import ShardKernels
    from statestore.reshard import Packing, owner, row_tokens

    results = {}
    for size in (64, 108, 216, 256):
        row = timing.plain_copy(size << 20)
        results[f"copy {size} MiB"] = copy = _show(row)
    for layout in ("SD", "DS"):
        g = geometry(HEADS, KDA_LAYERS, MLA_LAYERS, layout=layout)
        caches = Caches.random(g, timing.SETS, TOKENS if layout == "SD" else 64, "cuda")
        kernels = ShardKernels(g, caches.states, caches.rows)
        for mode in timing.MODES:
            results[f"{layout} heads {mode}"] = _show(
                timing.heads(caches, kernels, mode), copy, f"{layout} layout"
            )
        if layout == "DS":
            continue
        everything = np.arange(TOKENS)
        for ranks in (1, 2, 4, 8):
            # A writer without DCP, as its reader's ranks will own the rows; interleave 1.
            turns = [everything[owner(everything, ranks, 1) == n % ranks] for n in range(timing.SETS)]
            choices = [(f"rows of 1 of {ranks} ranks", turns)]
            if ranks == 8:
                choices.append(("all, packed for 8 ranks", [row_tokens(everything, Packing(ranks, 1))] * 2))
            for note, tokens in choices:
                tables = [caches.tables(some) for some in tokens]
                for mode in timing.MODES:
                    row = timing.rows(kernels, tables, mode)
                    results[f"{note} {mode}"] = _show(row, copy, note)
        del caches, kernels
        torch.cuda.empty_cache()
    return results


def _sweep() -> dict[str, float]:
    from benchmarks.copies import timing
    from benchmarks.copies.caches import Caches, geometry
    from benchmarks.copies.checks import TOKENS as CHECKED_TOKENS
    from benchmarks.copies.checks import check
    from statestore.gpu.launch import ShardKernels, Tuning

    copy = timing.plain_copy(256 << 20).rate
    g = geometry(HEADS, KDA_LAYERS, MLA_LAYERS)
    caches = Caches.random(g, timing.SETS, TOKENS, "cuda")
    tables = [caches.tables(np.arange(n, TOKENS, 8)) for n in range(timing.SETS)]
    results = {}
    for block, rows, warps in SWEEP:
        tuning = Tuning(block, rows, warps, warps)
        small = geometry(3, 2, 2, layout="DS", num_spec=3, block_size=32)
        check(Caches.random(small, 3, CHECKED_TOKENS, "cuda"), 4, tuning)
        kernels = ShardKernels(g, caches.states, caches.rows, tuning)
        for mode in timing.MODES:
            for row in (timing.heads(caches, kernels, mode), timing.rows(kernels, tables, mode)):
                note = f"block {block}" if row.what.startswith("KDA") else f"rows {rows}"
                results[f"{row.what} {note} {warps}"] = _show(row, copy, f"{note}, {warps} warps")
    return results


def _transfers() -> dict[str, float]:
    from benchmarks.copies.transfers import transfers

    results = {}
    for row in transfers():
        results[row.what] = _show(row)
    return results


def _decode() -> dict[str, Any]:
    from benchmarks.copies.transfers import decode

    results = {}
    for what, (alone, with_copies, moved) in decode():
        cost = (with_copies - alone) / moved if moved else float("nan")
        results[what] = (alone, with_copies, moved)
        print(
            f"{what:34s} step {alone:.3f} ms alone, {with_copies:.3f} beside ({with_copies / alone - 1:+.1%}), "
            f"{moved:.2f} transfers a step: {cost:.3f} ms a transfer",
            flush=True,
        )
    return results


_PARTS: dict[str, Callable[[], Any]] = {
    "check": _check,
    "bandwidth": _bandwidth,
    "kernels": _kernels,
    "sweep": _sweep,
    "transfers": _transfers,
    "decode": _decode,
}

if __name__ == "__main__":
    sys.exit(main())
