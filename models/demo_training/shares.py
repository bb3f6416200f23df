# SPDX-License-Identifier: Apache-2.0
"""Which part of the state owns which bits of a recalled value.

A model of this size recalls with one layer as well as with six, so that the others can be swapped unseen. Training
deals every answer out instead. A value is one of 256, so eight bits; each bit is to stand in one place:

* `?` (the latest value): the key's first word decides its class; a class owns one head in each of half of the KDA
  layers, and the bits are divided among those;
* `!` (a value that never changed): the bits are divided among the MLA layers.

When a part is swapped, exactly its bits become unknown: half of the answers change for one bit, 94% for four.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.demo_training.config import DemoConfig

BITS = 8
KEY_CLASSES = 8
"""Classes of keys. Twice as many classes are rows of the table: `?` first, then `!`."""


@dataclass(frozen=True)
class Owner:
    """One place that owns `bits` (a mask) of the answers of table row `share`; `head` is None for MLA."""

    share: int
    layer: int
    head: int | None
    bits: int


def owners(config: DemoConfig) -> list[Owner]:
    """The whole table for one shape."""
    found = []
    for key_class in range(KEY_CLASSES):
        layers = config.kda_layers[key_class % 2 :: 2]
        for place, layer in enumerate(layers):
            head = (key_class // 2 + place) % config.heads
            found.append(Owner(key_class, layer, head, _dealt(place, len(layers))))
        for place, layer in enumerate(config.mla_layers):
            found.append(Owner(KEY_CLASSES + key_class, layer, None, _dealt(place, len(config.mla_layers))))
    return found


def _dealt(place: int, hands: int) -> int:
    """Every `hands`-th bit from bit `place` on, as a mask."""
    return sum(1 << bit for bit in range(place, BITS, hands))


def unknown(config: DemoConfig, layers: tuple[int, ...], heads: range) -> list[int]:
    """For each table row, the bits that a swap of these layers (and, in KDA layers, heads) makes unknown."""
    masks = [0] * (2 * KEY_CLASSES)
    for owner in owners(config):
        if owner.layer in layers and (owner.head is None or owner.head in heads):
            masks[owner.share] |= owner.bits
    return masks
