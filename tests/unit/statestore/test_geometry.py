# SPDX-License-Identifier: Apache-2.0
"""A geometry refuses what cannot exist, survives JSON, and maps to another or refuses by name."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

from statestore.geometry import DTYPE_BYTES, Geometry, GeometryError
from statestore.reshard import GeometryMismatch, compatible

KIMI_LINEAR = Geometry(
    model_digest="a1" * 16,
    quantisation="none",
    kda_layers=tuple(layer for layer in range(27) if layer % 4 != 3 and layer != 26),
    mla_layers=(3, 7, 11, 15, 19, 23, 26),
    num_heads=32,
    head_k=128,
    head_v=128,
    conv_width=4,
    conv_layout="SD",
    num_spec=0,
    recurrent_dtype="float32",
    conv_dtype="bfloat16",
    kv_cache_dtype="bfloat16",
    latent_width=576,
    block_size=12288,
    page_bytes=16 << 20,
    tp=1,
)
K3 = dataclasses.replace(
    KIMI_LINEAR,
    kda_layers=tuple(range(69)),
    mla_layers=tuple(range(69, 93)),
    num_heads=96,
    tp=8,
    block_size=1536,
)

OTHER: dict[str, Any] = {
    "model_digest": "b2" * 16,
    "quantisation": "fp8",
    "kda_layers": (0, 1),
    "mla_layers": (3, 7),
    "num_heads": 64,
    "head_k": 64,
    "head_v": 64,
    "conv_width": 3,
    "conv_layout": "DS",
    "num_spec": 3,
    "recurrent_dtype": "bfloat16",
    "conv_dtype": "float16",
    "kv_cache_dtype": "float8_e4m3",
    "latent_width": 512,
    "block_size": 1536,
    "page_bytes": 17 << 20,
    "tp": 4,
    "dcp": 2,
    "interleave": 16,
    "layout_version": 1,
}
"""Another valid value of every field."""

MAY_DIFFER = {"tp", "dcp", "interleave", "block_size", "page_bytes", "num_spec", "conv_layout"}


def change(geometry: Geometry, field: str) -> Geometry:
    """The geometry with another value of one field, and only what that value needs beside it."""
    extra = {"tp": 4} if field == "dcp" else {}
    return dataclasses.replace(geometry, **extra, **{field: OTHER[field]})


def test_every_field_has_another_value() -> None:
    assert set(OTHER) == {field.name for field in dataclasses.fields(Geometry)}


def test_sizes_are_the_models() -> None:
    """The known sizes: Kimi-Linear 8,064 and K3 27,648 bytes a token; 43.4 and 449 MB a sequence."""
    assert KIMI_LINEAR.sizes.mla_token == 8064
    assert K3.sizes.mla_token == 27648
    assert round(KIMI_LINEAR.sizes.kda / 1e6, 1) == 43.4
    assert round(K3.sizes.kda / 1e6) == 449
    assert K3.sizes.kda == 8 * K3.sizes.kda_rank
    assert round(K3.sizes.boundary(8192) / 1e6) == 676
    fp8 = dataclasses.replace(K3, kv_cache_dtype="float8_e4m3")
    assert fp8.sizes.mla_token == 13824


def test_sizes_do_not_depend_on_the_layout() -> None:
    for field in sorted(MAY_DIFFER):
        assert change(KIMI_LINEAR, field).sizes.boundary(100) == KIMI_LINEAR.sizes.boundary(100)


def test_json_round_trip() -> None:
    again = Geometry.from_json(KIMI_LINEAR.to_json())
    assert again == KIMI_LINEAR
    assert again.fingerprint() == KIMI_LINEAR.fingerprint()
    assert isinstance(again.kda_layers, tuple)


def test_fingerprint_covers_every_field() -> None:
    prints = {KIMI_LINEAR.fingerprint()} | {change(KIMI_LINEAR, field).fingerprint() for field in OTHER}
    assert len(prints) == 1 + len(OTHER)


def test_fingerprint_is_the_same_in_another_process() -> None:
    """Hash randomisation differs between processes; the fingerprint must not."""
    code = "import sys; from statestore.geometry import Geometry as G; print(G.from_json(sys.argv[1]).fingerprint())"
    run = subprocess.run(
        [sys.executable, "-c", code, KIMI_LINEAR.to_json()],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert run.stdout.strip() == KIMI_LINEAR.fingerprint()


@pytest.mark.parametrize("module", ["statestore.geometry", "statestore.reshard", "statestore.boundary"])
def test_imports_no_engine_tensor_library_or_client(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "print([m for m in ('torch', 'vllm', 'mooncake', 'grpc', 'etcd3aio') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_digest": ""}, "model_digest"),
        ({"quantisation": None}, "quantisation"),
        ({"kda_layers": (), "mla_layers": ()}, "kda_layers"),
        ({"kda_layers": (1, 0)}, "kda_layers"),
        ({"kda_layers": (0, 0)}, "kda_layers"),
        ({"kda_layers": (-1, 0)}, "kda_layers"),
        ({"kda_layers": 20}, "kda_layers"),
        ({"mla_layers": (0, 3)}, "mla_layers"),
        ({"num_heads": 0}, "num_heads"),
        ({"head_k": 1.5}, "head_k"),
        ({"conv_width": 1}, "conv_width"),
        ({"conv_layout": "SDD"}, "conv_layout"),
        ({"num_spec": -1}, "num_spec"),
        ({"recurrent_dtype": "fp32"}, "recurrent_dtype"),
        ({"kv_cache_dtype": "auto"}, "kv_cache_dtype"),
        ({"tp": 5}, "tp"),
        ({"tp": True}, "tp"),
        ({"tp": 4, "dcp": 3}, "dcp"),
        ({"dcp": 2}, "dcp"),
        ({"interleave": 7}, "interleave"),
        ({"interleave": 24576}, "interleave"),
        ({"page_bytes": 1000}, "page_bytes"),
        ({"num_spec": 10**4}, "page_bytes"),
    ],
)
def test_what_cannot_exist_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(GeometryError, match=f"geometry field {field}=") as caught:
        dataclasses.replace(KIMI_LINEAR, **changes)
    assert caught.value.field == field
    assert caught.value.remedy in str(caught.value)


@pytest.mark.parametrize("field", sorted(OTHER))
def test_json_with_missing_or_unknown_field_is_refused(field: str) -> None:
    values = KIMI_LINEAR.to_dict()
    values[field + "_x"] = values.pop(field)
    with pytest.raises(GeometryError) as caught:
        Geometry.from_dict(values)
    assert caught.value.field == field + "_x"
    del values[field + "_x"]
    with pytest.raises(GeometryError, match="is missing") as caught:
        Geometry.from_dict(values)
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["", "[1]", "null", '{"tp": 1'])
def test_json_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(GeometryError, match="geometry field json"):
        Geometry.from_json(text)


@pytest.mark.parametrize("field", sorted(OTHER))
def test_compatible_refuses_by_name_what_changes_meaning(field: str) -> None:
    """Every field is either mapped or refused; there is no third kind."""
    other = change(KIMI_LINEAR, field)
    if field in MAY_DIFFER:
        compatible(KIMI_LINEAR, other)
        compatible(other, KIMI_LINEAR)
        return
    for src, dst in ((KIMI_LINEAR, other), (other, KIMI_LINEAR)):
        with pytest.raises(GeometryMismatch, match=f"geometry field {field} differs") as caught:
            compatible(src, dst)
        assert (caught.value.field, caught.value.src_value, caught.value.dst_value) == (
            field,
            getattr(src, field),
            getattr(dst, field),
        )
        assert caught.value.remedy in str(caught.value)


def test_dcp_groups_are_consecutive_ranks() -> None:
    geometry = dataclasses.replace(KIMI_LINEAR, tp=8, dcp=4)
    assert [geometry.dcp_rank(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    with pytest.raises(ValueError, match="rank 8"):
        geometry.dcp_rank(8)


def test_json_is_plain() -> None:
    values = json.loads(KIMI_LINEAR.to_json())
    assert values["mla_layers"] == [3, 7, 11, 15, 19, 23, 26]
    assert values["recurrent_dtype"] in DTYPE_BYTES
