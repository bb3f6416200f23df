# SPDX-License-Identifier: Apache-2.0
"""Keep freed tensor memory in the process: page faults otherwise cost more than the kernels that use the memory.

By default glibc returns the top of its heap to the system after every step and maps large blocks afresh, so each
temporary of a few MB is faulted in page by page, again and again.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 32 << 20
"""The largest value that glibc accepts on 64-bit systems."""

KEPT_BYTES = 256 << 20
"""Freed bytes at the top of the heap that stay with the process: a bound on what this costs in resident memory."""


def keep_freed_memory(kept_bytes: int = KEPT_BYTES) -> bool:
    """Tell glibc to keep up to ``kept_bytes`` of freed heap; return False where the C library has no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    mapped = mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    trimmed = mallopt(_M_TRIM_THRESHOLD, kept_bytes)
    return bool(mapped and trimmed)
