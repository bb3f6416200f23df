# SPDX-License-Identifier: Apache-2.0
"""JSON that people and other programs write: whatever is wrong with it is a ValueError."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """`json.loads`, but nesting that is too deep for the interpreter is a ValueError too, as all other mistakes are."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
