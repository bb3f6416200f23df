# SPDX-License-Identifier: Apache-2.0
"""The command against an endpoint that is a double, with the reference's answers kept from before."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltaserve.cli import main as cli
from deltaserve.config import VerifyConfig
from deltaserve.verify import main, reference
from deltaserve.verify.client import Endpoint, EndpointError, sampling_fields
from deltaserve.verify.compare import Answer
from deltaserve.verify.prompts import Case, Group, Prompt
from tests.unit.verify.fake_endpoint import FakeEndpoint, Reply, true_answer, true_trace
from tests.unit.verify.test_verify_prompts import recall_model

ReplyTo = Callable[[dict[str, Any]], Reply | int]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder without an engine that could run it."""
    folder = tmp_path / "model"
    folder.mkdir()
    recall_model(folder)
    config = {
        "vocab_size": 500,
        "architectures": ["X"],
        "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(64))
    return folder


@pytest.fixture
def engine_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The aggregated engine answers truly, and each of its runs is noted with the number of groups."""
    calls: list[int] = []

    def compute(config: Any, groups: list[Group]) -> list[list[Answer]]:
        calls.append(len(groups))
        return [
            [
                true_answer(
                    {
                        "prompt": list(case.prompt.tokens),
                        "max_tokens": case.max_tokens,
                        **sampling_fields(case),
                    }
                )
                for case in group.cases
            ]
            for group in groups
        ]

    monkeypatch.setattr(reference, "_compute", compute)
    monkeypatch.setenv(main.CACHE_VARIABLE, str(tmp_path / "cache"))
    return calls


@pytest.fixture
def serve() -> Iterator[Callable[[ReplyTo], FakeEndpoint]]:
    """Starts endpoints, and closes them after the test."""
    made: list[FakeEndpoint] = []

    def start(reply: ReplyTo) -> FakeEndpoint:
        made.append(FakeEndpoint(reply))
        return made[-1]

    yield start
    for each in made:
        each.close()


def well(body: dict[str, Any]) -> Reply:
    """Everything as it must be."""
    return true_answer(body), true_trace(body)


def config(endpoint: FakeEndpoint, model: Path, /, **fields: Any) -> VerifyConfig:
    """A short run against a running endpoint."""
    base = {"endpoint": endpoint.url, "model": model, "lengths": [1, 2, 17, 129], "concurrency": 3}
    return VerifyConfig.model_validate({**base, **fields})


def test_a_right_endpoint_passes_and_the_json_says_what_came_from_where(
    model: Path, engine_calls: list[int], serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "result.json"
    endpoint = serve(well)
    assert main.run(config(endpoint, model, json_file=out)) == 0
    document = json.loads(out.read_text())
    assert document["passed"] is True
    assert (document["requests"], document["different"]) == (22, 0)
    by_name = {(r["name"], r["placement"]): r for r in document["results"]}
    assert by_name["129 seeded", "handover"]["from_store"] == 128
    assert by_name["129 seeded", "handover"]["recomputed"] == 1
    assert by_name["129 seeded", "handover"]["prompt_tokens"] == 129
    assert by_name["129 seeded", "auto"]["from_store"] == 0
    assert by_name["1 greedy", "handover"]["route"].startswith("local")
    output = capsys.readouterr().out
    assert "passed: 22 requests, 0 different" in output
    assert "129 greedy  handover      128" in output


def test_the_command_line_runs_it(model: Path, engine_calls: list[int], serve: Any, tmp_path: Path) -> None:
    # With the variable for the kept answers set, which must not be taken for an option.
    flags = ["--endpoint", serve(well).url, "--model", str(model), "--lengths", "2,17", "--concurrency", "1"]
    assert cli.main(["verify", *flags, "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["requests"] == 8
    assert list((tmp_path / "cache").rglob("*.json")), "the answers are kept where the variable says"


def test_requests_force_the_handover_and_have_a_salt_of_their_own(
    model: Path, engine_calls: list[int], serve: Any
) -> None:
    endpoint = serve(well)
    assert main.run(config(endpoint, model)) == 0
    first, second = endpoint.bodies[:11], endpoint.bodies[11:]
    assert all(body["kv_transfer_params"] == {"placement": "handover"} for body in first)
    assert len({body["cache_salt"] for body in first}) == 11
    assert not any("kv_transfer_params" in body or "cache_salt" in body for body in second)
    assert {body["temperature"] for body in first} == {0.0, 0.8}
    assert all(("seed" in body) == (body["temperature"] > 0) for body in first)
    assert all(body["ignore_eos"] and body["logprobs"] == 1 for body in endpoint.bodies)


def test_with_drafts_only_greedy_requests_are_compared(
    model: Path, engine_calls: list[int], serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = serve(well)
    drafts = {"extra_args": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}}
    assert main.run(config(endpoint, model, decode_options=drafts)) == 0
    assert {body["temperature"] for body in endpoint.bodies} == {0.0}
    assert "drafts: greedy requests only" in capsys.readouterr().out


def test_the_engine_runs_once_and_only_for_what_is_not_known(
    model: Path, engine_calls: list[int], serve: Any
) -> None:
    endpoint = serve(well)
    for fields in ({}, {}, {"lengths": [1, 2, 17, 129, 33]}):
        assert main.run(config(endpoint, model, **fields)) == 0
    assert engine_calls == [9, 2], "one more length, greedy and seeded"
    assert main.run(config(endpoint, model, max_num_batched_tokens=64)) == 0
    assert engine_calls == [9, 2, 9], "other settings of the engine are another engine"
    (model / "model.safetensors").write_bytes(bytes(63) + b"1")
    assert main.run(config(endpoint, model)) == 0
    assert engine_calls == [9, 2, 9, 9], "other weights are another model"


@pytest.mark.parametrize("placement", ["handover", "auto"])
def test_another_token_fails(
    model: Path, engine_calls: list[int], serve: Any, placement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(body: dict[str, Any]) -> Reply:
        answer = true_answer(body)
        forced = "kv_transfer_params" in body
        if len(body["prompt"]) == 129 and forced == (placement == "handover") and not body["temperature"]:
            answer = Answer((*answer.tokens[:-1], answer.tokens[-1] + 1), answer.logprobs)
        return answer, true_trace(body)

    assert main.run(config(serve(reply), model)) == 1
    output = capsys.readouterr().out
    assert "DIFFERENT from token 15" in output
    assert "FAILED: 22 requests, 1 different" in output


@pytest.mark.parametrize(("shift", "code"), [(5e-4, 0), (2e-3, 1)])
def test_logprobs_beyond_the_tolerance_fail(
    model: Path, engine_calls: list[int], serve: Any, shift: float, code: int
) -> None:
    def reply(body: dict[str, Any]) -> Reply:
        answer = true_answer(body)
        return Answer(answer.tokens, (*answer.logprobs[:-1], answer.logprobs[-1] + shift)), true_trace(body)

    assert main.run(config(serve(reply), model)) == code


@pytest.mark.parametrize(
    "change",
    [
        {"from_store": 127, "recomputed": 2},
        {"from_store": 0, "recomputed": 129, "failure": "digest"},
        {"from_store": 0, "recomputed": 129, "route": "local prefill_failed d", "failure": "prefill_failed"},
    ],
)
def test_right_answers_without_the_handover_fail(
    model: Path, engine_calls: list[int], serve: Any, change: dict[str, Any]
) -> None:
    def reply(body: dict[str, Any]) -> Reply:
        spoilt = len(body["prompt"]) == 129 and "kv_transfer_params" in body
        return true_answer(body), {**true_trace(body), **(change if spoilt else {})}

    assert main.run(config(serve(reply), model)) == 1
    assert main.run(config(serve(reply), model, placements=["auto"])) == 0, "auto claims nothing of it"


def test_an_endpoint_without_traces_cannot_show_a_handover(
    model: Path, engine_calls: list[int], serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(config(serve(lambda body: (true_answer(body), {})), model)) == 1
    assert "says nothing about this request" in capsys.readouterr().out


def test_an_error_of_the_endpoint_is_one_line(
    model: Path, engine_calls: list[int], serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(config(serve(lambda body: 503), model)) == 1
    assert "/v1/completions answered 503" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpoint": "http://127.0.0.1:9"}, "is the cluster running?"),
        ({"endpoint": "127.0.0.1:9"}, "is no URL"),
        ({"endpoint": "http://["}, "is the cluster running?"),
        ({"endpoint": "http://127.0.0.1:abc"}, "is the cluster running?"),
        ({"lengths": [], "concurrency": 1}, "lengths: empty"),
        ({"json_file": Path("/")}, "Is a directory: '/'"),
        ({"damage": "flip"}, "damage: it is injected by the decode workers"),
        ({"max_model_len": 129}, "max_model_len 129; raise --max-model-len"),
        ({"max_model_len": 512}, "max_model_len: 512 does not hold the prompts that are sent at once"),
        ({"placements": []}, "placements: empty"),
        ({"lengths": [0]}, "lengths: 0 is no prompt length"),
        ({"model": Path("/nowhere")}, "/nowhere: no such folder"),
        ({"endpoint": "", "prefill": 0}, "prefill: 0 workers can hand nothing over"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_remedy(
    model: Path,
    engine_calls: list[int],
    serve: Any,
    fields: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.run(config(serve(well), model, **fields)) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_an_engine_that_fails_is_reported_with_the_end_of_its_log(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    serve: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The real process, with a folder that no engine can load: it ends by itself, quickly or not at all.
    monkeypatch.setattr(reference.sys, "executable", "/bin/false")
    monkeypatch.setenv(main.CACHE_VARIABLE, str(tmp_path / "cache"))
    assert main.run(config(serve(well), model)) == 1
    assert "the aggregated engine ended with exit code 1" in capsys.readouterr().err


def test_quick_is_shorter_unless_lengths_are_given(model: Path, engine_calls: list[int], serve: Any) -> None:
    endpoint = serve(well)
    assert main.run(VerifyConfig(endpoint=endpoint.url, model=model, quick=True, placements=["auto"])) == 0
    assert [len(body["prompt"]) for body in endpoint.bodies[:5]] == [1, 2, 17, 129, 500]
    assert {body["temperature"] for body in endpoint.bodies[:5]} == {0.0}
    assert len(endpoint.bodies) == 5 + 8
    before = len(endpoint.bodies)
    given = VerifyConfig(
        endpoint=endpoint.url, model=model, quick=True, placements=["auto"], lengths=[5], concurrency=1
    )
    assert main.run(given) == 0
    assert [len(body["prompt"]) for body in endpoint.bodies[before:]] == [5]


def test_kept_answers_are_bounded_and_a_broken_file_is_no_answer(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "kept"
    group = Group((Case("a", Prompt((1, 2))),))
    answer = Answer((1,), (-0.5,))
    for length in range(100, 100 + reference.CACHED_ENGINES + 3):
        settings = reference.engine_config(VerifyConfig(model=model, max_model_len=length))
        store = reference.AnswerStore(root, settings)
        store.put(group, [answer])
        store.trim()
        assert reference.AnswerStore(root, settings).get(group) == [answer]
    assert len(list(root.iterdir())) == reference.CACHED_ENGINES
    for path in root.rglob("*.json"):
        path.write_text("{")
    assert reference.AnswerStore(root, settings).get(group) is None


def test_the_client_says_what_an_answer_lacks(serve: Any) -> None:
    endpoint = Endpoint(serve(lambda body: (Answer((1,), ()), {})).url + "/v1/")
    answer, trace = endpoint.complete(Case("x", Prompt((1, 2))), "auto")
    assert (answer.tokens, trace) == ((1,), {})
    assert endpoint.health() == {}
    with pytest.raises(EndpointError, match="answered 429"):
        Endpoint(serve(lambda body: 429).url).complete(Case("x", Prompt((1, 2))), "auto")
