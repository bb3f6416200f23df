# SPDX-License-Identifier: Apache-2.0
"""Where compiled kernels outlive the process that compiled them."""

from __future__ import annotations

import os
from pathlib import Path


def kernel_caches(otherwise: Path) -> dict[str, str]:
    """The variables that tell torch and Triton: below XDG_CACHE_HOME or the user's home.

    A user who has no home (neither HOME nor an entry in the system's list of users, as in some containers) gets the
    folder `otherwise`.
    """
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(named) if named else Path.home() / ".cache") / "deltaserve"
    except RuntimeError:
        folder = otherwise
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
