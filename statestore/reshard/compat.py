# SPDX-License-Identifier: Apache-2.0
"""Whether state may move from one geometry to another; asked before a byte moves."""

from __future__ import annotations

import json
from functools import lru_cache

from statestore.geometry import Geometry

_MUST_AGREE: tuple[tuple[str, str], ...] = (
    ("layout_version", "run the same version of this software on both roles"),
    ("model_digest", "serve the same model and weights on both roles"),
    ("quantisation", "load the weights with the same quantisation on both roles"),
    ("kda_layers", "serve the same model on both roles"),
    ("mla_layers", "serve the same model on both roles"),
    ("num_heads", "serve the same model on both roles"),
    ("head_k", "serve the same model on both roles"),
    ("head_v", "serve the same model on both roles"),
    ("conv_width", "serve the same model on both roles: the convolution window differs"),
    ("recurrent_dtype", "give both roles the same recurrent state dtype (mamba_ssm_cache_dtype)"),
    ("conv_dtype", "give both roles the same convolution state dtype (mamba_cache_dtype)"),
    ("kv_cache_dtype", "give both roles the same KV cache dtype (kv_cache_dtype)"),
    ("latent_width", "serve the same model on both roles"),
)
"""Fields that change what a byte means. The others (tp, dcp, interleave, block_size, page_bytes, num_spec,
conv_layout) only change where it lies, and the maps take care of that."""


class GeometryMismatch(ValueError):
    """State cannot move from `src` to `dst`: `field` differs, and no index map can make up for it."""

    def __init__(self, field: str, src_value: object, dst_value: object, remedy: str) -> None:
        super().__init__(
            f"geometry field {field} differs: source has {src_value!r}, target has {dst_value!r}; {remedy}"
        )
        self.field = field
        self.src_value = src_value
        self.dst_value = dst_value
        self.remedy = remedy


def compatible(src: Geometry, dst: Geometry) -> None:
    """Return when every byte of `src` has its place in `dst`; raise `GeometryMismatch` for the first that has not."""
    for field, remedy in _MUST_AGREE:
        src_value, dst_value = getattr(src, field), getattr(dst, field)
        if src_value != dst_value:
            raise GeometryMismatch(field, src_value, dst_value, remedy)


@lru_cache(maxsize=256)
def meaning(geometry: str) -> str:
    """What a byte of state means under a geometry (`Geometry.to_json`): equal for two exactly when `compatible`.

    So workers fall into groups within which all may hand over to all. "" for "": a worker that did not say. One that
    cannot be read is a group of its own.
    """
    if not geometry:
        return ""
    try:
        read = Geometry.from_json(geometry)
    except ValueError:
        return geometry
    return json.dumps([getattr(read, field) for field, _ in _MUST_AGREE])


def refusal(src: str, dst: str) -> str:
    """Why state cannot move from one geometry to another (`Geometry.to_json`), naming field and remedy; "": it can.

    What a worker did not say ("") refuses nothing here: its loads still do.
    """
    if not src or not dst:
        return ""
    try:
        compatible(Geometry.from_json(src), Geometry.from_json(dst))
    except ValueError as error:
        return str(error)
    return ""
