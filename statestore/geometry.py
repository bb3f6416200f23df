# SPDX-License-Identifier: Apache-2.0
"""The shape of one role's cache: everything that decides where a byte of state lies.

A prefill worker and a decode worker may differ in tensor parallelism (TP), decode context parallelism (DCP),
interleave, block size, speculation and convolution layout. Each publishes a `Geometry`;
`statestore.reshard.compatible` says whether state can move between two of them, and the plans of
`statestore.reshard` say which byte goes where.

What the numbers mean in the engine's cache, on one rank, for one block of one layer::

    KDA recurrent   [num_heads/tp, head_v, head_k]                     recurrent_dtype, contiguous
    KDA conv "SD"   [conv_width - 1 + num_spec, channels]              conv_dtype, contiguous
    KDA conv "DS"   [channels, conv_width - 1 + num_spec]              conv_dtype, contiguous
                    channels = num_heads/tp · (2·head_k + head_v), in the order q | k | v, head by head in each
    MLA             [block_size, latent_width]                         kv_cache_dtype, one row a token

KDA heads are divided among the TP ranks and are not divided by DCP. MLA is the same on every TP rank, unless
DCP divides its tokens: token t belongs to DCP rank (t // interleave) % dcp, and TP rank d is DCP rank d % dcp.

This module is plain data and arithmetic: it imports no engine, no tensor library and no client.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

LAYOUT_VERSION = 2
"""Version of the meaning of the stored bytes (see `statestore.reshard`). Raise it whenever that changes."""

DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
}
"""Bytes an element of every dtype that state may have. Names are exact: an alias would change a fingerprint."""

ConvLayout = Literal["SD", "DS"]


class GeometryError(ValueError):
    """A geometry that cannot exist. `field` names what is wrong, `remedy` what to change."""

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(f"geometry field {field}={value!r} {problem}; {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy


@dataclass(frozen=True)
class ByteSizes:
    """What the state of one boundary weighs, without page padding, replicas and speculative columns (bytes)."""

    kda_rank: int
    """KDA state of one TP rank: recurrent and convolution parts of its heads, all KDA layers."""
    kda: int
    """KDA state of all ranks together; independent of TP."""
    mla_token: int
    """MLA latent rows of one token, all MLA layers, one copy."""

    def boundary(self, tokens: int) -> int:
        """Bytes of one boundary that hands over `tokens` tokens: KDA once, MLA once a token."""
        return self.kda + tokens * self.mla_token


@dataclass(frozen=True)
class Geometry:
    """One role's cache. Raises `GeometryError`, which names field and remedy, when it cannot exist."""

    model_digest: str
    """Digest over the model's configuration and weights; state of another model means nothing."""
    quantisation: str
    """Name of the weights' quantisation, "none" without one: activations, and so state, depend on it."""
    kda_layers: tuple[int, ...]
    """Indices in the model of the layers with KDA, ascending."""
    mla_layers: tuple[int, ...]
    """Indices in the model of the layers with MLA, ascending."""
    num_heads: int
    """KDA heads of the whole model (before TP)."""
    head_k: int
    """Key channels K a head; q and k have this many channels each."""
    head_v: int
    """Value channels V a head."""
    conv_width: int
    """Width W of the causal convolution; its state is the last W-1 raw columns."""
    conv_layout: ConvLayout
    """"SD": columns outermost; "DS": channels outermost."""
    num_spec: int
    """Speculative tokens a step; the cache has this many further convolution columns. 0 without speculation."""
    recurrent_dtype: str
    conv_dtype: str
    kv_cache_dtype: str
    latent_width: int
    """Elements of one cached MLA row: kv_lora_rank + rope dimension."""
    block_size: int
    """Tokens of one MLA block on one rank (a block id covers block_size · dcp tokens)."""
    page_bytes: int
    """Bytes that one block of one layer occupies in the cache, padding included."""
    tp: int
    dcp: int = 1
    interleave: int = 1
    """Consecutive tokens that one DCP rank owns before the next rank's turn."""
    layout_version: int = LAYOUT_VERSION

    def __post_init__(self) -> None:
        # JSON and configuration files give lists; equality and hashing need tuples.
        for name in ("kda_layers", "mla_layers"):
            object.__setattr__(self, name, _layers(name, getattr(self, name)))
        self._check_values()
        self._check_divisions()
        self._check_page()

    def _check_values(self) -> None:
        for name in ("model_digest", "quantisation"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                remedy = "give the name, or 'none'" if name == "quantisation" else "give the model's digest"
                raise GeometryError(name, value, "is not a non-empty string", remedy)
        if not self.kda_layers and not self.mla_layers:
            raise GeometryError("kda_layers", (), "and mla_layers are both empty", "give the model's layers")
        shared = set(self.kda_layers) & set(self.mla_layers)
        if shared:
            raise GeometryError(
                "mla_layers",
                self.mla_layers,
                f"shares {sorted(shared)} with kda_layers",
                "list each layer once",
            )
        for name in _POSITIVE:
            _check_int(name, getattr(self, name), 1)
        _check_int("conv_width", self.conv_width, 2)
        _check_int("num_spec", self.num_spec, 0)
        if self.conv_layout not in ("SD", "DS"):
            raise GeometryError("conv_layout", self.conv_layout, "is unknown", "use 'SD' or 'DS'")
        for name in ("recurrent_dtype", "conv_dtype", "kv_cache_dtype"):
            value = getattr(self, name)
            if value not in DTYPE_BYTES:
                raise GeometryError(name, value, "is unknown", f"use one of {', '.join(DTYPE_BYTES)}")

    def _check_divisions(self) -> None:
        if self.num_heads % self.tp:
            raise GeometryError(
                "tp",
                self.tp,
                f"does not divide num_heads={self.num_heads}",
                "choose a TP that divides the heads",
            )
        if self.tp % self.dcp:
            raise GeometryError(
                "dcp", self.dcp, f"does not divide tp={self.tp}", "choose a DCP that divides the TP size"
            )
        if self.block_size % self.interleave:
            raise GeometryError(
                "interleave",
                self.interleave,
                f"does not divide block_size={self.block_size}",
                "choose an interleave between 1 and the block size that divides it",
            )

    def _check_page(self) -> None:
        need = 0
        if self.kda_layers:
            columns = self.conv_columns + self.num_spec
            need = self.recurrent_rank_bytes + columns * self.conv_channels * self.conv_bytes
        if self.mla_layers:
            need = max(need, self.block_size * self.latent_row_bytes)
        if self.page_bytes < need:
            raise GeometryError(
                "page_bytes",
                self.page_bytes,
                f"is smaller than the {need} bytes that one block of one layer needs",
                "take the page size from the engine's cache specification",
            )

    @property
    def heads_per_rank(self) -> int:
        return self.num_heads // self.tp

    @property
    def conv_columns(self) -> int:
        """History columns that are state: W-1, never the speculative ones."""
        return self.conv_width - 1

    @property
    def conv_channels(self) -> int:
        """Convolution channels of one rank, q | k | v."""
        return self.heads_per_rank * (2 * self.head_k + self.head_v)

    @property
    def recurrent_bytes(self) -> int:
        """Bytes an element of the recurrent state."""
        return DTYPE_BYTES[self.recurrent_dtype]

    @property
    def conv_bytes(self) -> int:
        """Bytes an element of the convolution state."""
        return DTYPE_BYTES[self.conv_dtype]

    @property
    def latent_row_bytes(self) -> int:
        """Bytes of one token's row in one MLA layer."""
        return self.latent_width * DTYPE_BYTES[self.kv_cache_dtype]

    @property
    def recurrent_rank_bytes(self) -> int:
        """Bytes of one layer's recurrent state on one rank."""
        return self.heads_per_rank * self.head_v * self.head_k * self.recurrent_bytes

    @property
    def sizes(self) -> ByteSizes:
        """The bytes that a boundary in this geometry moves."""
        conv = self.conv_columns * self.conv_channels * self.conv_bytes
        kda_rank = len(self.kda_layers) * (self.recurrent_rank_bytes + conv)
        return ByteSizes(kda_rank, kda_rank * self.tp, len(self.mla_layers) * self.latent_row_bytes)

    def dcp_rank(self, tp_rank: int) -> int:
        """The DCP rank of a TP rank: DCP groups are consecutive TP ranks. Raises ValueError outside [0, tp)."""
        if not 0 <= tp_rank < self.tp:
            raise ValueError(f"rank {tp_rank} is outside [0, {self.tp})")
        return tp_rank % self.dcp

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values; `from_dict` reads them back."""
        values = dict(vars(self))
        values["kda_layers"] = list(self.kda_layers)
        values["mla_layers"] = list(self.mla_layers)
        return values

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces; equal geometries give equal text."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Geometry:
        """Read `to_dict`'s output. Raises `GeometryError` for a missing, unknown or wrong field."""
        fields = {field.name for field in dataclasses.fields(cls)}
        for name in values:
            if name not in fields:
                raise GeometryError(name, values[name], "is unknown", "run the same version on every role")
        for name in sorted(fields):
            if name not in values:
                # Defaults are for code; a record that leaves a field out was written by something else.
                raise GeometryError(name, None, "is missing", "run the same version on every role")
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> Geometry:
        """Read `to_json`'s output. Raises `GeometryError` as `from_dict` does, also when it is no JSON object."""
        return _read(text)

    def fingerprint(self) -> str:
        """32 hexadecimal digits over every field; stable across processes, machines and Python versions."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]


@functools.lru_cache(maxsize=256)
def _read(text: str) -> Geometry:
    """A cluster has few geometries, and every record carries one: it is read once."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise GeometryError("json", text[:80], f"does not parse ({error})", "publish it again") from error
    if not isinstance(values, dict):
        raise GeometryError("json", text[:80], "is not an object", "publish it again")
    return Geometry.from_dict(values)


_POSITIVE = (
    "num_heads",
    "head_k",
    "head_v",
    "latent_width",
    "block_size",
    "page_bytes",
    "tp",
    "dcp",
    "interleave",
    "layout_version",
)


def _check_int(name: str, value: object, least: int) -> None:
    # bool is an int to Python, and True would pass as a TP size of 1.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise GeometryError(name, value, f"is not an integer of at least {least}", "correct the value")


def _layers(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)):
        raise GeometryError(name, value, "is not a list of layer indices", "list the model's layer indices")
    for index in value:
        _check_int(name, index, 0)
    layers = tuple(value)
    if any(low >= high for low, high in itertools.pairwise(layers)):
        raise GeometryError(name, value, "is not strictly ascending", "list the layers in the model's order")
    return layers
