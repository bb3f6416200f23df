# SPDX-License-Identifier: Apache-2.0
"""What the recovery benchmark, and the tests of drains, take for the same answer, and what they report of kills."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.recovery import __main__ as benchmark
from benchmarks.recovery.__main__ import quantile, report
from benchmarks.recovery.streams import KINDS, Stream, differences, streams

EVENTS: list[dict[str, Any]] = [
    {"id": "cmpl-1", "choices": [{"text": "on", "token_ids": [7]}]},
    {"id": "cmpl-1", "choices": [{"text": "ce", "token_ids": [8, 9]}]},
    {"id": "cmpl-1", "choices": [{"text": "", "finish_reason": "length"}]},
    {"id": "cmpl-1", "choices": [], "usage": {"completion_tokens": 3}},
]


def taken(events: list[dict[str, Any]], done: bool = True) -> Stream:
    """A stream that has read these events."""
    stream = Stream("", {})
    for event in events:
        stream._take(json.dumps(event).encode())
    if done:
        stream._take(b"[DONE]")
    return stream


def test_a_stream_keeps_text_tokens_count_and_ends() -> None:
    whole = taken(EVENTS)
    assert whole.outcome == ("once", [7, 8, 9], 3, ["length", "[DONE]"], "")
    assert differences({"greedy": taken(EVENTS)}, {"greedy": whole}) == {}


@pytest.mark.parametrize(
    "events",
    [
        EVENTS[1:],
        [EVENTS[0], *EVENTS],
        [{**EVENTS[0], "choices": [{"text": "on", "token_ids": [6]}]}, *EVENTS[1:]],
        [{**EVENTS[0], "choices": [{"text": "On", "token_ids": [7]}]}, *EVENTS[1:]],
        [*EVENTS[:3], {**EVENTS[3], "usage": {"completion_tokens": 4}}],
        [*EVENTS[:2], EVENTS[3]],
        [*EVENTS, {"error": {"message": "the router is stopping"}}],
    ],
    ids=["lost", "repeated", "another token", "another text", "another count", "no finish", "error"],
)
def test_a_damaged_answer_is_seen(events: list[dict[str, Any]]) -> None:
    assert list(differences({"greedy": taken(events)}, {"greedy": taken(EVENTS)})) == ["greedy"]


def test_an_end_without_done_is_seen() -> None:
    assert list(differences({"greedy": taken(EVENTS, done=False)}, {"greedy": taken(EVENTS)})) == ["greedy"]


def test_there_is_one_stream_of_each_kind_and_fields_go_into_all() -> None:
    made = streams("http://x", "demo", [1, 2], 5, cache_salt="s")
    assert set(made) == set(KINDS)
    assert {stream.body["cache_salt"] for stream in made.values()} == {"s"}


@pytest.mark.parametrize(
    ("values", "expected"), [([], 0.0), ([2.0], 2.0), ([1.0] * 9 + [5.0], 1.0), ([1.0] * 8 + [5.0] * 2, 5.0)]
)
def test_the_ninetieth_percentile(values: list[float], expected: float) -> None:
    assert quantile(values, 0.9) == expected


def test_the_report_counts_what_was_exact_and_what_was_moved(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [
        {"worker": "decode-0", "hit": ["greedy"], "wrong": {}, "pauses": {"greedy": 1.0, "chat": 3.0}},
        {"worker": "prefill-0", "hit": [], "wrong": {}, "pauses": {}},
        {"worker": "decode-1", "hit": ["greedy"], "wrong": {"greedy": "x"}, "pauses": {"greedy": 2.0}},
    ]
    found = report(rows, 0.3)
    assert (found["exact"], found["decode_kills"], found["prefill_kills"]) == (2, 2, 1)
    assert (found["median_pause"], found["p90_pause"], found["worst_pause"]) == (2.0, 3.0, 3.0)
    assert found["moved"] == {**dict.fromkeys(KINDS, 0), "greedy": 2, "chat": 1}
    printed = capsys.readouterr().out
    assert "2 of 3 kills exact" in printed
    lines = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line[:6].strip() in KINDS}
    # streams, exact; moved, of these exact; median, ninetieth percentile and worst pause
    assert lines["greedy"] == ["3", "2", "2", "1", "1.50", "2.00", "2.00"]
    assert lines["chat"] == ["3", "3", "1", "1", "3.00", "3.00", "3.00"]
    assert lines["tools"] == ["3", "3", "0", "0", "0.00", "0.00", "0.00"]


def test_a_kill_waits_for_two_decode_workers_and_a_prefill_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([{}, (1, 1), (0, 2), (1, 2)])

    def health(_endpoint: str, _path: str) -> dict[str, Any]:
        ready = next(seen)
        return {"roles": {"prefill": {"ready": ready[0]}, "decode": {"ready": ready[1]}}} if ready else {}

    monkeypatch.setattr(benchmark, "fetch", health)
    monkeypatch.setattr(benchmark.time, "sleep", lambda _seconds: None)
    benchmark.wait_serving(SimpleNamespace(endpoint="http://x"))
    assert next(seen, None) is None
    monkeypatch.setattr(benchmark, "READY_SECONDS", 0.0)
    seen = iter([(1, 1)] * 99)
    with pytest.raises(TimeoutError, match="do not come back"):
        benchmark.wait_serving(SimpleNamespace(endpoint="http://x"))


@pytest.mark.parametrize("options", [["--go-on"], ["--go-on", "--json", "/nowhere/x"], ["--decode", "1"]])
def test_what_cannot_be_counted_is_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(options)


@pytest.mark.parametrize(
    ("status", "expected"), [("running", "decode-0"), ("finished", "decode-1"), ("", "decode-1")]
)
def test_who_has_the_stream_is_killed(monkeypatch: pytest.MonkeyPatch, status: str, expected: str) -> None:
    workers = [
        {"id": "a", "address": "here:1", "requests": 1},
        {"id": "b", "address": "here:2", "requests": 3},
    ]
    documents: dict[str, dict[str, Any]] = {
        "/health": {"roles": {"decode": {"workers": workers}}},
        "/deltaserve/requests/cmpl-1": {"route": "handover p a", "status": status} if status else {},
    }
    monkeypatch.setattr(benchmark, "fetch", lambda _endpoint, path: documents[path])
    cluster = SimpleNamespace(
        endpoint="http://x",
        statuses={
            "decode-0": SimpleNamespace(address="here:1"),
            "decode-1": SimpleNamespace(address="here:2"),
        },
    )
    assert benchmark.victim(cluster, Stream("", {}, id="cmpl-1")) == expected


def test_a_pause_that_falls_between_two_chunks_of_a_tool_call_counts() -> None:
    assert benchmark.pause("tools", Stream("", {}, times=[4.0, 9.0]), {"longest_pause": 1.5}, 4.5) == 1.5
    assert benchmark.pause("greedy", Stream("", {}, times=[4.0, 5.0]), {"longest_pause": 1.5}, 4.5) == 1.5
    assert benchmark.pause("greedy", Stream("", {}, times=[4.0, 6.0]), {"longest_pause": 1.5}, 4.5) == 2.0
    assert benchmark.pause("greedy", Stream("", {}, times=[4.0, 6.0]), {}, 4.5) == 2.0


@pytest.mark.parametrize(
    ("moment", "expected"), [(1.5, 3.0), (2.5, 3.0), (0.9, 1.0), (4.9, 3.0), (5.1, 0.2), (9.0, 0.0)]
)
def test_a_gap_elsewhere_in_the_stream_is_no_pause(moment: float, expected: float) -> None:
    stream = Stream("", {}, times=[0.0, 1.0, 2.0, 5.0, 5.2], gap=3.0)
    assert stream.gap_at(moment) == pytest.approx(expected)
