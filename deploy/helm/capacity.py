# SPDX-License-Identifier: Apache-2.0
"""Capacity planning: what the state of a model weighs, and what that asks of network and memory.

    python -m deploy.helm.capacity --model kimi-k3 --tokens 8192 --tp 8 --dcp 8 --requests 64 --rate 4

The bytes are those of `statestore.geometry`, exact. Times are floors: bytes over a link's bandwidth. The cache of a
rank is an estimate: what running sequences hold, without padding of pages and without what prefix caching keeps on top.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from deltaserve.model_check import ModelError, read_facts
from statestore.geometry import Geometry, GeometryError

STATES = 2
"""Recurrent states that a running sequence holds a layer: the one that is computed with, and the last one at a block's
end, which prefix caching keeps."""
LINKS_GBPS = (100, 400)
ROW_BLOCK = 64
"""Tokens of a block; it does not change any of the sizes here."""


@dataclass(frozen=True)
class Shape:
    """What decides how much state a model has."""

    name: str
    kda_layers: int
    mla_layers: int
    heads: int
    head_dim: int
    conv_width: int = 4
    latent_width: int = 576
    """kv_lora_rank 512 and 64 rope channels."""


SHAPES = {
    "kimi-k3": Shape("kimi-k3", kda_layers=69, mla_layers=24, heads=96, head_dim=128),
    "kimi-linear": Shape("kimi-linear", kda_layers=20, mla_layers=7, heads=32, head_dim=128),
}


def shape_of(model: str) -> Shape:
    """A known shape, or the one of a model folder. Raises ModelError for a folder that is no hybrid model."""
    if model in SHAPES:
        return SHAPES[model]
    folder = Path(model)
    facts = read_facts(folder)
    document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = document.get("text_config") or document
    latent = int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])
    return Shape(
        folder.resolve().name,
        facts.kda_layers,
        facts.mla_layers,
        facts.kda_heads,
        facts.kda_head_dim,
        facts.conv_width,
        latent,
    )


def geometry(shape: Shape, tp: int = 1, dcp: int = 1, kv_dtype: str = "bfloat16") -> Geometry:
    """A cache of this shape. Raises GeometryError naming what does not divide."""
    columns = shape.conv_width - 1
    channels = shape.heads * 3 * shape.head_dim
    page = shape.heads * shape.head_dim**2 * 4 + columns * channels * 2 + ROW_BLOCK * shape.latent_width * 4
    return Geometry(
        model_digest=shape.name,
        quantisation="none",
        kda_layers=tuple(range(shape.kda_layers)),
        mla_layers=tuple(range(shape.kda_layers, shape.kda_layers + shape.mla_layers)),
        num_heads=shape.heads,
        head_k=shape.head_dim,
        head_v=shape.head_dim,
        conv_width=shape.conv_width,
        conv_layout="SD",
        num_spec=0,
        recurrent_dtype="float32",
        conv_dtype="bfloat16",
        kv_cache_dtype=kv_dtype,
        latent_width=shape.latent_width,
        block_size=ROW_BLOCK,
        page_bytes=page,
        tp=tp,
        dcp=dcp,
    )


@dataclass(frozen=True)
class Plan:
    """What a load asks for. Bytes, seconds."""

    state: int
    """KDA state of one sequence, all ranks, whatever its length."""
    token: int
    """MLA rows of one token, one copy."""
    boundary: int
    """One handoff of `tokens` tokens."""
    floors: dict[int, float]
    """Gb/s of a link → seconds that one boundary takes at least."""
    traffic: float
    """Bytes a second that cross the wire at this rate."""
    rank_cache: int
    """Cache of one decode rank for `requests` sequences of `tokens` tokens."""
    segment: int
    """Memory that a decode worker lends to the store, to hold a boundary of each request until its end."""


def plan(
    shape: Shape,
    tokens: int,
    tp: int = 1,
    dcp: int = 1,
    requests: int = 1,
    rate: float = 1.0,
    kv_dtype: str = "bfloat16",
) -> Plan:
    """Everything about a load of `rate` handoffs a second. Raises GeometryError for tp and dcp that cannot be."""
    sizes = geometry(shape, tp, dcp, kv_dtype).sizes
    boundary = sizes.boundary(tokens)
    shared = -(-tokens // dcp)  # DCP divides the tokens; without it every rank has all of them
    return Plan(
        state=sizes.kda,
        token=sizes.mla_token,
        boundary=boundary,
        floors={link: boundary * 8 / (link * 1e9) for link in LINKS_GBPS},
        traffic=boundary * rate,
        rank_cache=requests * (STATES * sizes.kda_rank + shared * sizes.mla_token),
        segment=requests * boundary,
    )


def kv_cache_bytes(device_gib: float, weights_gib: float, tp: int, working_gib: float = 12.0) -> int:
    """What is left of a device for `kvCacheBytes`: 95 % of it, less its share of the weights and the working memory.

    Raises ValueError when nothing is left.
    """
    left = int((0.95 * device_gib - weights_gib / tp - working_gib) * 2**30)
    if left <= 0:
        raise ValueError(
            f"a device of {device_gib:g} GiB has no room for a cache beside {weights_gib / tp:.0f} GiB of weights; "
            "raise tp"
        )
    return left


def report(shape: Shape, found: Plan, arguments: argparse.Namespace) -> str:
    """The plan as text."""
    lines = [
        ("KDA state of a sequence", f"{found.state:,} bytes ({found.state // arguments.tp:,} a rank)"),
        ("MLA rows of a token", f"{found.token:,} bytes"),
        (f"one handoff of {arguments.tokens:,} tokens", f"{found.boundary / 1e6:,.0f} MB"),
        *(
            (f"  at {link} Gb/s, at least", f"{seconds * 1e3:,.1f} ms")
            for link, seconds in found.floors.items()
        ),
        (
            f"network at {arguments.rate:g} handoffs/s",
            f"{found.traffic / 1e9:,.2f} GB/s ({found.traffic * 8 / 1e9:,.1f} Gb/s)",
        ),
        (
            f"cache of a decode rank, {arguments.requests} requests",
            f"{found.rank_cache / 2**30:,.1f} GiB (kvCacheBytes: at least {found.rank_cache})",
        ),
        (
            "memory a decode worker lends",
            f"{found.segment / 2**30:,.1f} GiB (segmentBytes: at least {found.segment})",
        ),
    ]
    if arguments.device_gib:
        left = kv_cache_bytes(arguments.device_gib, arguments.weights_gib, arguments.tp)
        lines.append(("cache that a device has room for", f"{left / 2**30:,.1f} GiB (kvCacheBytes: {left})"))
    width = max(len(name) for name, _ in lines)
    head = f"{shape.name}: tp {arguments.tp}, dcp {arguments.dcp}, {arguments.kv_dtype} latent rows"
    return "\n".join([head, *(f"  {name:<{width}}  {value}" for name, value in lines)])


def main(argv: list[str] | None = None) -> int:
    """Print a plan; 2 when tp, dcp, the model or the device cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.helm.capacity", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", default="kimi-k3", help=f"{', '.join(SHAPES)}, or a model folder")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument("--tp", type=int, default=8, help="tensor-parallel size of a decode worker")
    parser.add_argument("--dcp", type=int, default=1, help="decode context parallel size")
    parser.add_argument("--requests", type=int, default=64, help="requests that a decode worker runs at once")
    parser.add_argument("--rate", type=float, default=1.0, help="handoffs a second")
    parser.add_argument("--kv-dtype", default="bfloat16", help="dtype of latent rows, e.g. float8_e4m3")
    parser.add_argument("--weights-gib", type=float, default=0.0, help="size of the *.safetensors, GiB")
    parser.add_argument("--device-gib", type=float, default=0.0, help="memory of one GPU, GiB; 0: not asked")
    arguments = parser.parse_args(argv)
    try:
        shape = shape_of(arguments.model)
        found = plan(
            shape,
            arguments.tokens,
            arguments.tp,
            arguments.dcp,
            arguments.requests,
            arguments.rate,
            arguments.kv_dtype,
        )
        print(report(shape, found, arguments))
    except (GeometryError, ModelError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
