# SPDX-License-Identifier: Apache-2.0
"""The comparison under load: what arrives, what a row makes of times, what is not run twice, what a client takes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving import __main__ as command_line
from benchmarks.serving import model, parts, sides, stats, table, timeline
from benchmarks.serving.client import RequestFailed, completion, post
from benchmarks.serving.engine import server_flags
from benchmarks.serving.load import Load, Sent, run
from benchmarks.serving.sides import Aggregated, Delta, Nixl, Side, SideMissing, Sizes
from benchmarks.serving.stats import Slo, is_good, percentile, row
from benchmarks.serving.workload import Arrival, Workload, arrivals, poisson
from deltaserve.model_check import require_servable

SLO = Slo(1.0, 0.01)


def sent(at: float, first: float, step: float, answer: int = 4, error: str = "") -> Sent:
    """A request whose tokens come `step` seconds apart."""
    events = [] if error else [at + first + step * n for n in range(answer)]
    return Sent(at, answer, events=events, error=error, request_id=f"cmpl-{at}")


# ---- what arrives


def test_arrivals_of_a_seed_are_the_same_and_at_the_rate() -> None:
    times = poisson(8.0, 20.0, 1)
    assert times == poisson(8.0, 20.0, 1) == sorted(times)
    assert times != poisson(8.0, 20.0, 2)
    assert len(times) == 160
    assert times[-1] == pytest.approx(20.0)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    # Exponential gaps spread as widely as their mean; a metronome's would not.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.3)


@pytest.mark.parametrize(("rate", "seconds"), [(0.0, 1.0), (1.0, -1.0)])
def test_no_rate_is_refused(rate: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        poisson(rate, seconds, 0)


def test_sides_get_the_same_times_and_prompts_of_their_own() -> None:
    workload = Workload(200, 8, seed=3)
    ours, theirs = arrivals(workload, 2.0, 5.0, "delta"), arrivals(workload, 2.0, 5.0, "nixl")
    assert [one.at for one in ours] == [one.at for one in theirs]
    assert all(a.prompt[:64] != b.prompt[:64] for a, b in zip(ours, theirs, strict=True))
    assert all(a.prompt[64:] == b.prompt[64:] for a, b in zip(ours, theirs, strict=True))
    assert len({one.prompt for one in ours}) == len(ours)
    assert {len(one.prompt) for one in ours} == {200}


def test_shared_prompts_share_just_their_beginning() -> None:
    prompts = [one.prompt for one in arrivals(Workload(300, 8, shared=200), 2.0, 5.0, "agg")]
    assert len({prompt[:200] for prompt in prompts}) == 1
    assert len({prompt[200:264] for prompt in prompts}) == len(prompts)
    with pytest.raises(ValueError, match="lower it"):
        Workload(300, 8, shared=290)


# ---- rows


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentile(reversed(values), 0.5) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([7.0], 0.01) == 7.0
    assert percentile([], 0.5) is None


def test_goodput_counts_what_meets_both_limits() -> None:
    assert is_good(sent(3.0, 0.9, 0.009), SLO)
    assert not is_good(sent(3.0, 1.1, 0.009), SLO)
    assert not is_good(sent(3.0, 0.9, 0.011), SLO)
    assert not is_good(sent(3.0, 0.9, 0.009, error="no answer in time"), SLO)


def test_a_row_is_of_answered_requests_and_names_the_others() -> None:
    load = Load(
        [
            sent(0.0, 0.5, 0.005),
            sent(1.0, 2.0, 0.005),
            sent(2.0, 0.1, 0.02),
            sent(1.5, 0.0, 0.0, error="status 503"),
        ],
        100.0,
        4.0,
        1.0,
    )
    made = row(load, SLO)
    span = 3.015
    assert made["requests"] == 4
    assert made["failed"] == 1
    assert made["errors"] == ["status 503"]
    assert made["seconds"] == pytest.approx(span)
    assert made["goodput"] == pytest.approx(1 / span)
    assert made["tokens_per_s"] == pytest.approx(12 / span)
    assert made["ttft_p50"] == pytest.approx(500.0)
    assert made["ttft_p99"] == pytest.approx(2000.0)
    assert made["tpot_p99"] == pytest.approx(20.0)
    assert made["client_cpu"] == pytest.approx(0.25)


def test_events_that_carry_several_tokens_do_not_change_the_time_a_token_takes() -> None:
    one = sent(0.0, 0.1, 0.01, answer=5)
    merged = Sent(0.0, 5, events=[one.events[0], one.events[2], one.events[4]])
    assert stats.tpot(merged) == pytest.approx(stats.tpot(one))
    assert max(stats.pauses(merged)) > max(stats.pauses(one))


# ---- the client


@contextlib.contextmanager
def serving(reply: Callable[[bytes], bytes]) -> Iterator[Callable[[Any], Any]]:
    """Run a coroutine function with the URL of a server that answers every body with `reply(body)`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        writer.write(reply(await reader.readexactly(length)))
        await writer.drain()
        writer.close()

    def with_server(use: Any) -> Any:
        async def both() -> Any:
            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            async with server:
                port = server.sockets[0].getsockname()[1]
                return await use(f"http://127.0.0.1:{port}")

        return asyncio.run(both())

    yield with_server


def stream(*events: bytes, status: bytes = b"200 OK") -> bytes:
    body = b"".join(events)
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


TOKEN = b'data: {"id":"cmpl-7","choices":[{"text":"a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def test_a_stream_is_the_times_of_its_tokens() -> None:
    with serving(lambda body: stream(TOKEN, TOKEN, TOKEN, DONE)) as use:
        answer = use(lambda url: post(url, completion("m", (1, 2), 3), stream=True))
    assert answer.request_id == "cmpl-7"
    assert len(answer.events) == 3


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (stream(TOKEN), "without"),
        (
            stream(TOKEN, b'data: {"error": {"message": "the worker is gone"}}\n\n', DONE),
            "the worker is gone",
        ),
        (stream(b'{"error": "busy"}', status=b"429 Too Many Requests"), "status 429.*busy"),
        (stream(TOKEN, DONE)[:-4], "lost"),
    ],
    ids=["no end", "error event", "status", "cut off"],
)
def test_an_answer_that_is_none_is_said(reply: bytes, message: str) -> None:
    with serving(lambda body: reply) as use, pytest.raises(RequestFailed, match=message):
        use(lambda url: post(url, completion("m", (1, 2), 3), stream=True))


def test_the_loop_is_open_and_patience_ends() -> None:
    began: list[float] = []

    async def slow(one: Sent, begin: float) -> None:
        began.append(one.at)
        await asyncio.sleep(0.05 if one.at < 0.1 else 60.0)
        one.events = [one.at + 0.05]

    load = asyncio.run(run([(Sent(at, 2), slow) for at in (0.02, 0.0, 0.15)], 0.3))
    assert began == [0.0, 0.02, 0.15]
    assert [one.error for one in load.sent] == ["", "", "no answer in time"]
    assert load.seconds < 5.0


def test_vllms_two_engines_are_joined_by_what_the_first_one_gives() -> None:
    asked: list[dict[str, Any]] = []
    given = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "e"}

    def reply(body: bytes) -> bytes:
        asked.append(json.loads(body))
        if asked[-1]["stream"]:
            return stream(TOKEN, TOKEN, DONE)
        return stream(json.dumps({"id": "cmpl-1", "kv_transfer_params": given}).encode())

    with serving(reply) as use:

        async def once(url: str) -> Load:
            ask = Nixl([url, url]).ask(0, Arrival(0.0, (5, 6, 7), 2))
            return await run([(Sent(0.0, 2), ask)], 5.0)

        load = use(once)
    first, second = asked
    assert (first["max_tokens"], first["stream"]) == (1, False)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert (second["max_tokens"], second["prompt"]) == (2, [5, 6, 7])
    assert second["kv_transfer_params"] == given
    assert load.sent[0].error == ""
    assert load.sent[0].prefilled is not None
    assert 0 <= load.sent[0].prefilled <= load.sent[0].events[0]


@pytest.mark.parametrize(
    ("placement", "more", "said"),
    [
        ("", {}, None),
        ("handover", {}, "handover"),
        ("handover", {"kv_transfer_params": {"placement": "local"}}, "local"),
    ],
)
def test_requests_of_the_cluster_say_where_they_go(
    tmp_path: Path, placement: str, more: dict[str, Any], said: str | None
) -> None:
    asked: list[dict[str, Any]] = []

    def reply(body: bytes) -> bytes:
        asked.append(json.loads(body))
        return stream(TOKEN, TOKEN, DONE)

    with serving(reply) as use:

        async def once(url: str) -> Load:
            cluster: Any = SimpleNamespace(endpoint=url)
            ask = Delta(cluster, {}, tmp_path, placement).ask(0, Arrival(0.0, (5, 6, 7), 2), **more)
            return await run([(Sent(0.0, 2), ask)], 5.0)

        use(once)
    assert asked[0].get("kv_transfer_params", {}).get("placement") == said


# ---- sides


def test_the_model_has_the_form_that_is_measured(tmp_path: Path) -> None:
    facts = require_servable(model.write(tmp_path / "bench"))
    assert (facts.kda_layers, facts.mla_layers, facts.kda_heads, facts.kda_head_dim) == (12, 4, 24, 128)
    assert facts.full_rank_gate
    assert facts.gate_lower_bound == -5.0
    words = json.loads((tmp_path / "bench" / "tokenizer.json").read_text())["model"]["vocab"]
    assert set(words.values()) | set(range(len(words))) == set(range(model.VOCAB))


def test_all_sides_have_engines_of_the_same_sizes(tmp_path: Path) -> None:
    sizes = Sizes(model.DEMO, "cuda", 9000, extra={"load_format": "dummy"})
    flags = server_flags(sizes.worker())
    config = sides.cluster_config(sizes, tmp_path, {})
    for flag, value in (
        ("max-model-len", config.max_model_len),
        ("max-num-seqs", config.max_num_seqs),
        ("max-num-batched-tokens", config.max_num_batched_tokens),
        ("kv-cache-memory-bytes", config.kv_cache_bytes),
        ("prefix-match-unit", config.prefill_options["prefix_match_unit"]),
        ("load-format", config.decode_options["extra_args"]["load_format"]),  # type: ignore[index]
    ):
        assert f"--{flag}={value}" in flags
    assert "--enable-prefix-caching" in flags
    assert not [flag for flag in flags if "async" in flag], "what is for our handoff is left to vLLM"


def test_options_of_the_cluster_are_added(tmp_path: Path) -> None:
    sizes = Sizes(model.DEMO, "cpu", 900, extra={"load_format": "dummy"})
    more = {
        "decode_options": {"extra_args": {"async_scheduling": True}},
        "router_options": {"policy": "least"},
    }
    config = sides.cluster_config(sizes, tmp_path, more)
    assert config.decode_options["extra_args"] == {"load_format": "dummy", "async_scheduling": True}
    assert config.decode_options["checkpoint_bytes"] == 0
    assert config.prefill_options["extra_args"] == {"load_format": "dummy"}
    assert config.router_options == {"policy": "least"}


def test_nixl_is_named_where_it_cannot_run(tmp_path: Path) -> None:
    sizes = Sizes(model.DEMO, "cpu", 900)
    with pytest.raises(SideMissing, match="--device cuda"), sides.engines(sizes, tmp_path, "nixl", nixl=True):
        pass


# ---- what the roles have noted

MOMENTS = {
    "prefill-1.jsonl": [
        ["prepare", "a", 0.0, 0.1],
        ["computed", "a", 1.0, 1.0],
        ["gather", "", 0.9, 1.010],
        ["gather", "", 1.005, 1.015],
        ["put", "", 1.01, 1.03],
        ["written", "a", 1.03, 1.03],
        ["commit", "a", 1.035, 1.037],
        ["computed", "b", 2.0, 2.0],
    ],
    "decode-2.jsonl": [
        ["prepare", "a", 1.038, 1.040],
        ["load", "a", 1.044, 1.060],
        ["digest", "", 1.05, 1.055],
        ["restored", "a", 1.064, 1.064],
        ["first", "a", 1.070, 1.070],
    ],
    "router-3.jsonl": [["routed", "a", 1.071, 1.071]],
}


def notes(folder: Path) -> timeline.Noted:
    for name, lines in MOMENTS.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / name).write_text(text + '["half a li')
    return timeline.read(folder)


def test_steps_add_up_to_the_handoff(tmp_path: Path) -> None:
    found = timeline.handoffs(notes(tmp_path), {"a": 1.072, "b": 2.5, "c": 3.0})
    assert list(found) == ["a"], "b did not pass through all steps, c is unknown"
    steps = found["a"]
    assert sum(steps[name] for name, _, _ in timeline.STEPS) == pytest.approx(steps["handoff"])
    assert steps["handoff"] == pytest.approx(0.072)
    assert steps["write"] == pytest.approx(0.030)
    assert steps["gather"] == pytest.approx(0.015), "what came before, and what overlaps, counts once"
    assert steps["verify"] == pytest.approx(0.005)
    assert steps["scatter"] == 0.0
    assert timeline.medians(found.values())["report"] == pytest.approx(5.0)


def test_what_runs_beside_the_commit_is_not_on_the_path(tmp_path: Path) -> None:
    """An early read begins before the commit has ended, and may end before it."""
    noted = notes(tmp_path)
    noted.moments["a"] |= {
        "decode begins": 1.031,
        "decode prepared": 1.032,
        "load begins": 1.033,
        "load ends": 1.036,
    }
    steps = timeline.handoffs(noted, {"a": 1.072})["a"]
    assert [steps[name] for name in ("hand on", "record", "schedule", "load")] == [0.0] * 4
    assert steps["first step"] == pytest.approx(0.033)
    assert sum(steps[name] for name, _, _ in timeline.STEPS) == pytest.approx(steps["handoff"])


def test_metrics_are_added_up_over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {
        "u/0": 'x_sum{engine="0",stage="put"} 2.5\nx_count{engine="0",stage="put"} 5\n# HELP x\n',
        "u/1": 'x_sum{engine="1",stage="put"} 0.5\nx_count{engine="1",stage="put"} 1\n',
    }
    monkeypatch.setattr(parts, "_get", pages.get)
    side = Aggregated([])
    side.metrics = {"0": "u/0", "1": "u/1"}
    counted = parts.counts(side)
    assert parts.mean(counted, "x", "stage=put") == pytest.approx(0.5)
    assert parts.mean(parts.difference(counted, counted), "x", "stage=put") is None


def test_what_an_engines_cache_holds_is_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "decode-0.log"
    assert parts.capacity(log) == 0
    log.write_text("INFO GPU KV cache size: 1,024 tokens\nINFO GPU KV cache size: 25,311,232 tokens\n")
    assert parts.capacity(log) == 25_311_232


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sides", "agg,sglang"], "sglang is no side; choose among agg, nixl, delta"),
        (["--rates", "1,x"], "--rates: x is no number above 0"),
        (["--rates", "0"], "--rates: 0 is no number above 0"),
        (["--seconds", "-1"], "--seconds"),
        (["--shared", "299"], "lower it"),
        (["--delta", "[1]"], "--delta: give a JSON object"),
        (["--device", "tpu"], "invalid choice"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.options(["--out", str(tmp_path), *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_defaults_are_the_devices(tmp_path: Path) -> None:
    gpu = command_line.options(["--out", str(tmp_path), "--device", "cuda", "--answer", "99"])
    assert (gpu.rates, gpu.prompt, gpu.answer, gpu.tpot_slo) == ([4.75, 8.14, 11.5], 8192, 99, 0.0068)
    assert command_line.options(["--out", str(tmp_path)]).prompt == 300


class Echo(Side):
    """A side that answers at once."""

    def __init__(self, name: str, error: str = "") -> None:
        self.name, self.metrics, self._error = name, {}, error

    def ask(self, number: int, arrival: Arrival) -> Any:
        async def send(one: Sent, begin: float) -> None:
            if self._error and number == 1 and arrival.at > 0.2:
                raise OSError(self._error)
            one.events = [one.at + 0.01, one.at + 0.02]

        return send


def test_rows_with_a_result_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began: list[str] = []

    @contextlib.contextmanager
    def started(run: command_line.Run, name: str) -> Iterator[list[Side]]:
        began.append(name)
        if name == "nixl":
            raise SideMissing("nixl: the package nixl is not installed; pip install nixl")
        yield [Echo(name)]

    monkeypatch.setattr(command_line, "started", started)
    arguments = ["--out", str(tmp_path), "--seconds", "0.5", "--rates", "4"]
    assert command_line.main(arguments) == 1, "nixl is missing"
    shown = capsys.readouterr()
    assert "nixl: NOT MEASURED: nixl: the package nixl is not installed" in shown.err
    assert [line.split()[0] for line in shown.out.splitlines() if " 4 " in line] == ["agg", "delta"]
    assert command_line.main([*arguments, "--sides", "agg,delta"]) == 0
    assert began == ["agg", "nixl", "delta"], "known rows start nothing"
    assert command_line.main([*arguments, "--sides", "agg,delta", "--rates", "4,8"]) == 0
    assert began[3:] == ["agg", "delta"], "a further rate is measured"
    assert command_line.main([*arguments, "--sides", "agg", "--seed", "1"]) == 0
    assert began[5:] == ["agg"], "other arguments are another measurement"
    assert command_line.main([*arguments, "--sides", "agg", "--seed", "2", "--budget", "0.1"]) == 1
    assert began[6:] == [], "no time left"


def test_sides_start_together_and_are_measured_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began: list[str] = []
    both = threading.Barrier(2)

    @contextlib.contextmanager
    def started(run: command_line.Run, name: str) -> Iterator[list[Side]]:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(10)  # alone it would never start
        began.append(name)
        if name == "agg":
            raise RuntimeError("agg-0 did not start")
        yield [Echo(name)]
        began.append(f"{name} ended")

    monkeypatch.setattr(command_line, "started", started)
    arguments = ["--out", str(tmp_path), "--seconds", "0.5", "--rates", "4", "--sides", "agg,delta"]
    assert command_line.main([*arguments, "--together"]) == 1
    assert not both.broken
    assert (sorted(began[:2]), began[2:]) == (["agg", "delta"], ["delta ended"])
    shown = capsys.readouterr()
    assert "agg: NOT MEASURED: agg-0 did not start" in shown.err
    assert [line.split()[0] for line in shown.out.splitlines() if " 4 " in line] == ["delta"]


def test_engines_share_a_gpu_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []

    @contextlib.contextmanager
    def server(config: Any, flags: Any, environment: dict[str, str], log: Path) -> Iterator[Any]:
        chosen.append(environment["CUDA_VISIBLE_DEVICES"])
        yield "http://nowhere", None

    monkeypatch.setattr(sides, "_server", server)
    monkeypatch.setattr(sides, "_wait", lambda *server: None)
    sizes, warm = Sizes(model.DEMO, "cuda", 9000), threading.Event()
    for visible, expected in (("3", ["3", "3"]), ("3,5", ["3", "5"])):
        chosen.clear()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with sides.engines(sizes, tmp_path, "agg", nixl=False, warm=warm.set) as urls:
            assert len(urls) == 2
        assert chosen == expected
        assert warm.is_set()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with (
        pytest.raises(SideMissing, match="no GPU is visible"),
        sides.engines(sizes, tmp_path, "agg", nixl=False),
    ):
        pass


def test_a_row_says_that_its_engines_shared_a_gpu() -> None:
    made = {**row(Load([sent(0.5, 0.1, 0.01)], 0.0, 1.0, 0.1), SLO), "side": "agg", "rate": 4.0}
    assert "agg, 1 GPU" in table.rows_table([{**made, "gpus": 1}])
    assert "GPU" not in table.rows_table([{**made, "gpus": 2}])


def test_variants_of_the_cluster_stand_in_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.contextmanager
    def started(run: command_line.Run, name: str) -> Iterator[list[Side]]:
        yield [Echo(name)]

    monkeypatch.setattr(command_line, "started", started)
    arguments = ["--out", str(tmp_path), "--seconds", "0.5", "--rates", "4", "--sides", "delta"]
    more = '{"router_options": {"policy": "least"}}'
    assert command_line.main(arguments) == 0
    assert command_line.main([*arguments, "--label", "least", "--delta", more]) == 0
    assert command_line.main([*arguments, "--label", "other", "--seed", "1"]) == 0
    capsys.readouterr()
    assert command_line.main(arguments) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if " 4 " in line]
    assert shown == ["delta", "delta-least"], "another seed is another measurement"


def test_a_failed_request_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def started(run: command_line.Run, name: str) -> Iterator[list[Side]]:
        yield [Echo(name, "reset by peer")]

    monkeypatch.setattr(command_line, "started", started)
    arguments = ["--out", str(tmp_path), "--seconds", "1", "--rates", "8", "--sides", "agg"]
    assert command_line.main(arguments) == 1
    kept = json.loads((tmp_path / "agg-8.json").read_text())["row"]
    assert kept["failed"] == 1
    assert "reset by peer" in kept["errors"][0]


def test_aims_compare_the_sides_of_one_rate() -> None:
    ours = {"side": "delta", "rate": 4.0, "handoff_p50": 30.0, "ttft_p99": 200.0, "goodput": 6.0}
    theirs = {"side": "nixl", "rate": 4.0, "handoff_p50": 40.0, "ttft_p99": 100.0, "goodput": 4.0}
    (line,) = table.aims([ours, theirs, {"side": "agg", "rate": 4.0}, {**ours, "rate": 5.0}])
    assert line == "4 req/s, delta to nixl: handoff p50 0.75 x, TTFT p99 2.00 x, goodput 1.50 x"
