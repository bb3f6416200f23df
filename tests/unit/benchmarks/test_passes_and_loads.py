# SPDX-License-Identifier: Apache-2.0
"""What the comparison of passes starts and prints, what the timing of decode steps counts, how counters are read."""

from __future__ import annotations

import argparse
import io
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.loads import __main__ as loads
from benchmarks.passes import __main__ as passes
from benchmarks.started import Started
from deltaserve.cli.options import add_options, load
from deltaserve.config import ClusterConfig

METRICS = b"""# HELP deltaserve_prefill_passes_total x
deltaserve_prefill_passes_total 7.0
deltaserve_prefill_passes_total_more 100.0
deltaserve_prefill_tokens_total{kind="once"} 50.0
deltaserve_prefill_tokens_total{kind="again"} 3.0
"""


def asked(device: str, weightless: bool = False) -> argparse.Namespace:
    return argparse.Namespace(
        model=Path("models/demo"),
        device=device,
        max_model_len=4096,
        tokens=2048,
        kv_cache_bytes=1 << 28,
        weightless=weightless,
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("variant", passes.VARIANTS)
def test_a_cluster_takes_every_variants_options(device: str, variant: str) -> None:
    options, environment = passes.options(asked(device), variant)
    parser = argparse.ArgumentParser()
    add_options(parser, ClusterConfig, "up")
    config = load(ClusterConfig, "up", parser.parse_args(options), {})
    prefill = config.worker_options("prefill")
    assert (prefill.get("checkpoint_tokens") == 0) == (variant == "bare")
    assert environment == (
        {"DELTASERVE_INTERNAL_CHECKPOINTS": "0"} if (device, variant) == ("cuda", "two") else {}
    )
    if device == "cpu":
        extra: Any = prefill["extra_args"]
        assert extra["additional_config"] == {"kda_prefill_checkpoint": variant != "two"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_without_weights_is_one_for_both_workers(device: str) -> None:
    options, _ = passes.options(asked(device, weightless=True), "two")
    parser = argparse.ArgumentParser()
    add_options(parser, ClusterConfig, "up")
    config = load(ClusterConfig, "up", parser.parse_args(options), {})
    for role in ("prefill", "decode"):
        extra: Any = config.worker_options(role)["extra_args"]
        assert extra["load_format"] == "dummy"
        assert ("additional_config" in extra) == ((device, role) == ("cpu", "prefill"))


def test_counters_are_summed_over_their_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: io.BytesIO(METRICS))
    cluster = Started.__new__(Started)
    cluster._metrics = 1
    assert cluster.counter("deltaserve_prefill_passes_total") == 7
    assert cluster.counter("deltaserve_prefill_tokens_total") == 53
    assert passes._counts(cluster) == (7, 3)


def test_the_table_of_passes_compares_with_two_of_the_same_length() -> None:
    rows = [
        passes.Row("one", 1000, [0.04, 0.05, 0.06], [0.03], 1.0, 0, 9),
        passes.Row("two", 1000, [0.1, 0.1, 0.2], [0.03], 2.0, 0, 9),
    ]
    one, two = passes.table(rows).splitlines()[-2:]
    assert one.split()[:3] == ["1000", "one", "1.00"]
    assert (one.split()[-1], two.split()[-1]) == ("0.500", "1.000")
    assert passes.table(rows[:1]).splitlines()[-1].split()[-1] == "30.0", "nothing to compare with"


def test_the_table_of_loads_compares_with_requests_alone() -> None:
    phases = [
        loads.Phase("alone", [0.004] * 99 + [0.02]),
        loads.Phase("requests", [0.005] * 100, 8, 0),
        loads.Phase("loads", [0.006] * 100, 8, 1000),
    ]
    lines = [line.split() for line in loads.table(phases).splitlines()[-3:]]
    assert lines[0][:5] == ["alone", "0", "0", "4.160", "4.000"]
    assert lines[2][0] == "loads"
    assert lines[2][-1] == "+20.0%"
    phases.insert(2, loads.Phase("elsewhere", [0.0048] * 100, 8, 1000))
    assert loads.table(phases).splitlines()[-1].split()[-2:] == ["+25.0%", "+20.0%"]


@pytest.mark.parametrize(
    ("phase", "length", "placement", "where"),
    [
        ("requests", 2, "local", "own"),
        ("loads", 30, "handover", "own"),
        ("elsewhere", 30, "handover", "other"),
    ],
)
def test_what_arrives_in_a_phase(
    monkeypatch: pytest.MonkeyPatch, phase: str, length: int, placement: str, where: str
) -> None:
    arrived: list[tuple[str, int, str]] = []

    class Answers:
        def __init__(self, name: str) -> None:
            self.name = name

        def complete(self, case: Any, placement: str, salt: str) -> tuple[None, dict[str, Any]]:
            arrived.append((self.name, case.length, placement))
            return None, {"boundary_bytes": 7}

    def stream(endpoint: Any, tokens: int, gaps: list[float]) -> None:
        assert endpoint.name == "own", "the streams are of one cluster"
        time.sleep(0.1)
        gaps += [0.004] * 10

    monkeypatch.setattr(loads, "stream", stream)
    args = argparse.Namespace(length=30, streams=2, answer=10, every=0.02)
    own, other = Answers("own"), Answers("other")
    found = loads.run(own, phase, args, other)  # type: ignore[arg-type]
    assert set(arrived) == {(where, length, placement)}
    assert found.arrived > 0
    assert len(found.gaps) == 18


def test_a_stream_is_timed_event_by_event(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [b"data: {}\n", b"\n", b": comment\n", b"data: {}\n", b"data: {}\n", b"data: [DONE]\n"]
    sent: list[Any] = []

    class Reply(io.BytesIO):
        def __iter__(self) -> Any:
            return iter(events)

    def urlopen(request: Any, timeout: float) -> Reply:
        sent.append(json.loads(request.data))
        return Reply()

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    gaps: list[float] = []
    loads.stream(SimpleNamespace(url="http://x", model="m"), 3, gaps)  # type: ignore[arg-type]
    assert len(gaps) == 2, "three events, two gaps"
    assert (sent[0]["max_tokens"], sent[0]["kv_transfer_params"]) == (3, {"placement": "local"})


def test_requests_go_to_the_clusters_in_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked_of: list[str] = []

    class Answers:
        def __init__(self, url: str) -> None:
            self.url = url

        def complete(self, case: Any, placement: str, salt: str) -> tuple[None, dict[str, Any]]:
            assert (placement, bool(salt)) == ("handover", True)
            asked_of.append(self.url)
            trace = {"from_store": case.length - 1, "boundary_bytes": 5, "first_token_after": 0.2}
            return None, {**trace, "published_after": 0.1}

    monkeypatch.setattr(passes, "Endpoint", Answers)

    class Cluster:
        def __init__(self, name: str) -> None:
            self.name = self.url = name

        def counter(self, name: str) -> float:
            count = asked_of.count(self.name) * (2 if self.name == "two" else 1)
            return count if "passes" in name else 10 * count

    rows = passes.measure([Cluster("one"), Cluster("two")], [100, 200], 2)  # type: ignore[list-item]
    assert [(row.variant, row.length, row.passes, len(row.first)) for row in rows] == [
        ("one", 100, 1.0, 2),
        ("two", 100, 2.0, 2),
        ("one", 200, 1.0, 2),
        ("two", 200, 2.0, 2),
    ]
    assert asked_of[:6] == ["two", "one", "one", "two", "two", "one"]
    assert "of two" in capsys.readouterr().out
