# SPDX-License-Identifier: Apache-2.0
"""Engine-core requests as vLLM's front end makes them. vLLM is imported by the call: probes prepare it first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any


def core_request(
    name: str, prompt: Sequence[int], params: Any, *, external: str | None = None, salt: str | None = None
) -> Any:
    """A text request for the tokens `prompt`, with vLLM's SamplingParams; `external`: the id that its client knows."""
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=None,
        external_req_id=external,
    )
