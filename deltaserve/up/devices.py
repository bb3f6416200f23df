# SPDX-License-Identifier: Apache-2.0
"""Which CUDA devices this process and its children may use; asked without loading CUDA."""

from __future__ import annotations

import os
from pathlib import Path


def visible_devices() -> list[str]:
    """What CUDA_VISIBLE_DEVICES names, where it is set; else the indices of the machine's devices."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [part.strip() for part in named.split(",") if part.strip()]
    cards = [card for card in Path("/dev").glob("nvidia[0-9]*") if card.name[6:].isdigit()]
    return [str(index) for index in range(len(cards))]
