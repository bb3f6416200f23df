# SPDX-License-Identifier: Apache-2.0
"""Whether vLLM will find what this package adds to it.

vLLM asks the installed packages' entry points, in each process that it starts, and says nothing where there are none:
a worker that runs from a folder of sources then serves without the mends of deltaserve.engine (requests that begin with
a history, prefix hits inside a block, drafts that are folded), and one whose `VLLM_PLUGINS` names others likewise. So
an engine is not started without them.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

NAME = "deltaserve_cpu"
"""Of the entry points, see pyproject.toml."""
GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")
VARIABLE = "VLLM_PLUGINS"


class PluginMissingError(ValueError):
    """vLLM would run without this package's entry points; the message says why and what to do."""


def require_plugins() -> None:
    """Raise PluginMissingError unless vLLM will load this package's entry points in every process."""
    for group in GROUPS:
        if NAME not in {point.name for point in entry_points(group=group)}:
            raise PluginMissingError(
                f"vLLM finds no entry point {NAME} in {group}, so it would run without deltaserve's mends: this Python "
                "imports deltaserve from a folder that is not installed; run `pip install --no-deps -e FOLDER`"
            )
    allowed = os.environ.get(VARIABLE)
    if allowed is not None and NAME not in allowed.split(","):
        raise PluginMissingError(
            f"{VARIABLE}={allowed!r} keeps deltaserve's own entry points from vLLM; unset it, or add {NAME}"
        )
