# SPDX-License-Identifier: Apache-2.0
"""The note that stands for vLLM's flag: where it is written, refused and read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deltaserve.engine.cpu import replay


def config(*, flag: bool = True, drafts: int = 2, stages: int = 1, options: Any = None) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(use_replayssm=flag),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        additional_config={} if options is None else options,
        num_speculative_tokens=drafts,
    )


def test_the_flag_becomes_a_note_once_and_for_all() -> None:
    made = config(options={"kda_prefill_checkpoint": True})
    for _ in range(2):
        replay.take_over(made)
        assert not made.cache_config.use_replayssm
        assert made.additional_config == {"kda_prefill_checkpoint": True, replay.NOTE: True}
        assert replay.wanted(made)
    made.num_speculative_tokens = 0
    assert not replay.wanted(made), "nothing to fold"
    plain = config(flag=False)
    replay.take_over(plain)
    assert not replay.wanted(plain), "the control"


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"stages": 2}, "pipeline_parallel_size"), ({"options": "text"}, "additional_config must be a dict")],
)
def test_what_does_not_go_with_it_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replay.take_over(config(**changes))
    unasked = config(flag=False, **changes)
    replay.take_over(unasked)
    assert not replay.wanted(unasked), "the control"
