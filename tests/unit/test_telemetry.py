# SPDX-License-Identifier: Apache-2.0
"""Logs, spans and handoffs by themselves; what whole requests leave is in tests/scenario/test_scenario_observed.py."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from pydantic import ValidationError

from deltaserve.config import LogConfig, TraceConfig
from deltaserve.telemetry import about, tracing
from deltaserve.telemetry.logs import NAME_VARIABLE, VLLM_CONFIG, JsonFormatter, client_id, request_of
from deltaserve.telemetry.progress import KEPT, Board, Stage
from deltaserve.telemetry.span_ids import SystemIds

ROOT = Path(__file__).parents[2]
PACKAGES = ("deltaserve", "router", "prefill_worker", "decode_worker", "statestore")


def record(message: str, *args: Any, **extra: Any) -> logging.LogRecord:
    """A record as a logger makes it."""
    made = logging.LogRecord("router.books", logging.WARNING, __file__, 1, message, args, None)
    made.__dict__.update(extra)
    return made


def test_where_a_requests_id_comes_from() -> None:
    assert request_of(record("the store is away")) == ""
    assert request_of(record("request %s: %s", "cmpl-1", "late")) == "cmpl-1"
    assert request_of(record("%d objects of %s", 3, "cmpl-1")) == "", (
        "a first argument is an id only after `request`"
    )
    with about("cmpl-2"):
        assert request_of(record("no room")) == "cmpl-2"
        assert request_of(record("request %s: late", "cmpl-2-0")) == "cmpl-2", "as the client knows it"
        assert request_of(record("no room", request_id="cmpl-3")) == "cmpl-3"
    assert request_of(record("no room")) == ""


async def test_a_task_that_began_with_a_request_stays_about_it() -> None:
    async def later() -> str:
        await asyncio.sleep(0)
        return request_of(record("released"))

    with about("cmpl-4"):
        task = asyncio.create_task(later())
    assert await task == "cmpl-4"
    assert await asyncio.create_task(later()) == ""


def test_an_index_is_no_part_of_the_clients_id() -> None:
    assert client_id("cmpl-abc-0") == "cmpl-abc"
    assert client_id("chatcmpl-abc-0") == "chatcmpl-abc-0"


def test_a_json_line() -> None:
    try:
        raise ValueError("bad\nvalue")
    except ValueError:
        made = record("request %s: ümläut", "cmpl-5")
        made.exc_info = sys.exc_info()
    text = JsonFormatter("router").format(made)
    assert "\n" not in text
    line = json.loads(text)
    assert (line["request_id"], line["process"], line["level"]) == ("cmpl-5", "router", "warning")
    assert line["message"] == "request cmpl-5: ümläut"
    assert "ValueError: bad" in line["error"]
    assert line["time"].endswith("Z")
    assert "request_id" not in json.loads(JsonFormatter("router").format(record("joined")))


def calls_of_logs() -> Iterator[tuple[str, str]]:
    """Where, and with what words, the packages log."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id == "log"
                    and node.args
                    and isinstance(node.args[0], ast.Constant)
                ):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", str(node.args[0].value)


def test_a_line_about_a_request_begins_with_it() -> None:
    found = list(calls_of_logs())
    assert len(found) > 50
    wrong = [(where, words) for where, words in found if "request %s" in words[1:]]
    assert wrong == [], 'write "request %s ..." with its id as first argument, so that JSON lines carry it'
    assert sum(words.startswith("request %s") for _, words in found) > 5


@pytest.mark.parametrize("style", ["json", "text"])
def test_a_process_logs_as_it_is_told(style: str) -> None:
    """vLLM's own loggers too, as its ranks' processes are configured."""
    program = (
        "import json, logging, logging.config, sys\n"
        "from deltaserve.config import LogConfig\n"
        "from deltaserve.telemetry import configure_logging\n"
        "from deltaserve.telemetry.logs import hand_to_vllm\n"
        f"configure_logging('decode', LogConfig(format='{style}'))\n"
        "if sys.argv[1:]:\n"
        "    hand_to_vllm('decode')\n"
        f"    logging.config.dictConfig(json.load(open({str(VLLM_CONFIG)!r})))\n"
        "logging.getLogger('vllm.x').warning('slow')\n"
        "logging.getLogger('statestore').info('joined')\n"
    )
    for arguments in ([], ["vllm"]) if style == "json" else ([],):
        result = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if k != NAME_VARIABLE},
        )
        lines = result.stderr.splitlines()
        assert len(lines) == 2, result.stderr
        if style == "json":
            assert [json.loads(line)["message"] for line in lines] == ["slow", "joined"]
            assert {json.loads(line)["process"] for line in lines} == {"decode"}
        else:
            assert "decode vllm.x: slow" in lines[0]


def test_options_of_logs_and_traces() -> None:
    assert LogConfig().format == "text"
    assert TraceConfig().endpoint == "", "off by default"
    with pytest.raises(ValidationError, match="http://host:port"):
        TraceConfig(endpoint="localhost:4317")


def test_a_span_while_tracing_is_off() -> None:
    assert not tracing.enabled()
    span = tracing.begin("request", "00-" + "1" * 32 + "-" + "2" * 16 + "-01")
    assert span is tracing.NO_SPAN
    assert span.child("decode") is span
    assert span.traceparent == ""
    span.set(a=1)
    span.event("lost")
    span.end("broken")


def test_a_collector_that_is_away_costs_nothing_and_ends_in_time() -> None:
    tracing.configure(TraceConfig(endpoint="http://127.0.0.1:9"), "deltaserve.test")
    span = tracing.begin("request", "nonsense", request_id="r")
    child = span.child("decode", "client")
    assert child.traceparent[3:35] == span.traceparent[3:35]
    child.end()
    span.end()
    tracing.shut_down()
    assert not tracing.enabled()


def test_processes_with_one_seed_name_their_spans_apart() -> None:
    """vLLM seeds Python's generator in every worker."""
    found = []
    for ids in (SystemIds(), RandomIdGenerator()):
        drawn = []
        for _ in range(2):
            random.seed(0)
            drawn.append((ids.generate_span_id(), ids.generate_trace_id()))
        found.append(drawn[0] == drawn[1])
    assert found == [False, True], "the control: the SDK's own are equal"


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_share_of_traces_that_are_kept(ratio: float) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracing.configure(TraceConfig(ratio=ratio), "deltaserve.test", exporter=exporter)
    try:
        tracing.begin("own").end()
        tracing.begin("of a client that decided", "00-" + "1" * 32 + "-" + "2" * 16 + "-01").end()
        tracing.flush()
        names = [span.name for span in exporter.get_finished_spans()]
    finally:
        tracing.shut_down()
    assert names == (["own"] if ratio else []) + ["of a client that decided"]


def report(rank: int, failure: str = "", nbytes: int = 10) -> Any:
    """What a rank says."""
    return SimpleNamespace(rank=rank, failure=failure, nbytes=nbytes, seconds=0.5)


def test_a_handoff_rank_by_rank() -> None:
    board = Board()
    one = board.begin("cmpl-1", "publish", 100)
    one.go("publish", 2)
    one.reported("publish", [report(1)])
    (message,) = board.messages()
    assert message.state == "writing"
    assert [(rank.rank, rank.state, rank.bytes) for rank in message.ranks] == [
        (0, "busy", 0),
        (1, "done", 10),
    ]
    one.reported("publish", [report(0, "store_full", 0)])
    one.end("store_full")
    one.end("committed")
    (message,) = board.messages()
    assert (message.state, message.outcome) == ("failed", "store_full"), "the first end counts"
    assert message.ranks[0].failure == "store_full"
    assert message.took > 0


@pytest.mark.parametrize("stage", ["publish", "load"])
def test_a_job_of_the_other_kind_is_not_the_handoff_s(stage: Stage) -> None:
    """A prefill may begin with the load of a checkpoint; the answer after a load may be written as one."""
    other: Stage = "load" if stage == "publish" else "publish"
    board = Board()
    one = board.begin("cmpl-1", stage, 100)
    one.go(other, 1)
    one.reported(other, [report(0, "missing", 500)])
    assert [message.state for message in board.messages()] == ["waiting"]
    one.go(stage, 1)
    one.go(other, 1)
    one.reported(stage, [report(0)])
    one.end("committed" if stage == "publish" else "loaded")
    one.reported(other, [report(0, "store_full")])
    (message,) = board.messages()
    assert message.state == message.outcome == one.outcome
    assert [(rank.state, rank.bytes, rank.failure) for rank in message.ranks] == [("done", 10, "")]
    one.reported(stage, [report(0, "store_full")])  # the control: of its own kind it would be told
    assert [rank.failure for rank in board.messages()[0].ranks] == ["store_full"]


def test_a_report_that_is_late_is_still_told() -> None:
    board = Board()
    one = board.begin("cmpl-1", "load", 100)
    one.go("load", 1)
    one.end("aborted")
    one.reported("load", [report(0)])
    (message,) = board.messages()
    assert [(rank.state, rank.bytes) for rank in message.ranks] == [("done", 10)]


def test_a_boards_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    for number in range(KEPT + 10):
        board.begin(f"cmpl-{number}", "load", 1)
    assert [one.request_id for one in board.messages()][-1] == f"cmpl-{KEPT + 9}"
    assert len(board.messages()) == KEPT
    board.begin("cmpl-old", "load", 1).end("loaded")
    monkeypatch.setattr("deltaserve.telemetry.progress.ENDED_SECONDS", -1.0)
    assert "cmpl-old" not in [one.request_id for one in board.messages()], "ended ones go"
