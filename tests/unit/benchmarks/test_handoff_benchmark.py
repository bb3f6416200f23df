# SPDX-License-Identifier: Apache-2.0
"""The handoff benchmark measures handoffs that happened: its reader verifies, and notices what is not exact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.handoff import __main__ as command
from benchmarks.handoff import cluster, processes, table
from benchmarks.handoff.ledgers import LedgerLoop
from benchmarks.handoff.shapes import LAYERS, MIB, SETS, Caches, World, shape_of
from benchmarks.handoff.sides import NotVerified, PublishingSide, ReadingSide
from benchmarks.handoff.spans import Spans, covered, recorded_proofs
from deltaserve.membership import Member
from statestore.connector.checks import VerificationFailed
from statestore.connector.worker_half import failure_kind
from tests.doubles.ledger import LedgerDouble
from tests.doubles.membership import MembershipDouble, Register
from tests.doubles.pool import PoolDouble, Store

OWNER = "prefill-bench"


# ---- what is measured


@pytest.mark.parametrize("mib", sorted(LAYERS))
def test_sizes_are_what_they_are_called(mib: int) -> None:
    shape = shape_of(mib)
    assert 0.995 * mib * MIB < shape.nbytes <= mib * MIB
    assert sum(shape.parts) == shape.nbytes
    assert shape.length < shape.geometry.block_size


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(ValueError, match="use 1, 8, 64"):
        shape_of(2)


def test_caches_hold_the_sequence_that_was_filled() -> None:
    shape = shape_of(1)
    caches, worlds = Caches(shape), [World(shape, seed) for seed in range(SETS)]
    caches.fill(worlds[0], 0)
    caches.fill(worlds[1], 1)
    assert caches.holds(worlds[0], 0)
    assert caches.holds(worlds[1], 1)
    # Control: another sequence, one wrong bit in a state, one in a row, and poison.
    assert not caches.holds(worlds[0], 1)
    for at in (5, 900):
        page = caches.memory[0, caches.tables[0][0][0]]
        page[at] ^= 1
        assert not caches.holds(worlds[0], 0)
        page[at] ^= 1
    caches.memory[0, caches.tables[0][-1][0], 3] ^= 1
    assert not caches.holds(worlds[0], 0)
    caches.poison(1)
    assert not caches.holds(worlds[1], 1)


# ---- the two sides, over doubles


class Sides:
    def __init__(self, damage: str = "none") -> None:
        self.store, register = Store(), Register()
        pool = PoolDouble(self.store)
        self.loop = LedgerLoop(lambda: LedgerDouble(register))
        member = self.loop.run(MembershipDouble(register).join(Member(OWNER, "prefill", "h:1", "0", "0", 0)))
        shape = shape_of(1)
        self.publisher = PublishingSide(shape, pool, self.loop, OWNER, member.lease)
        self.reader = ReadingSide(shape, pool, self.loop, damage)
        self.nbytes = shape.nbytes

    def handoff(self, turn: int) -> Any:
        self.publisher.prepare(turn, "")
        self.reader.prepare(turn)
        published = self.publisher.publish()
        return published, self.reader.load(turn, published.boundary)

    def close(self) -> None:
        self.publisher.close()
        self.reader.close()
        self.loop.close()


@pytest.fixture
def sides() -> Iterator[Sides]:
    made = Sides()
    yield made
    made.close()


def test_a_handoff_is_exact_and_leaves_nothing(sides: Sides) -> None:
    for turn in range(3):
        published, loaded = sides.handoff(turn)
        sides.reader.check(turn)
        assert loaded.nbytes == sides.nbytes
        assert published.began < published.written < published.committed < loaded.asked
        assert loaded.asked < loaded.record < loaded.checked < loaded.ended
        for stage in ("gather", "proof", "put", "commit"):
            assert published.stages[stage] > 0, stage
        for stage in ("record", "get", "proof", "scatter"):
            assert loaded.stages[stage] > 0, stage
        sides.publisher.release()
        assert sides.store.objects == {}


def test_the_comparison_notices_one_bit(sides: Sides) -> None:
    sides.handoff(0)
    caches = sides.reader._caches
    caches.memory[0, caches.tables[0][0][0], 77] ^= 4
    with pytest.raises(NotVerified, match="turn 0"):
        sides.reader.check(0)


def test_a_flipped_bit_is_never_measured() -> None:
    damaged = Sides(damage="flip")
    try:
        with pytest.raises(VerificationFailed) as caught:
            damaged.handoff(0)
        assert failure_kind(caught.value) == "digest"
        with pytest.raises(NotVerified):
            damaged.reader.check(0)
    finally:
        damaged.close()


def test_a_boundary_without_a_commit_is_not_loaded(sides: Sides) -> None:
    sides.publisher.prepare(0, "")
    assert sides.publisher._record is not None
    with pytest.raises(NotVerified, match="not committed"):
        sides.reader.load(0, sides.publisher._record.id)


# ---- the command


def test_arguments() -> None:
    options = command.parser().parse_args([])
    assert (options.json, options.quick, options.sizes, options.damage, options.cluster) == (
        None,
        False,
        [1, 8, 64],
        "none",
        None,
    )
    options = command.parser().parse_args(["--quick", "--sizes", "8", "--json", "f", "--cluster"])
    assert (options.json, options.sizes, options.cluster) == (Path("f"), [8], "start")
    assert command.turns_of(options, 8) == command.QUICK_TURNS[8] < command.TURNS[8]
    assert command.turns_of(command.parser().parse_args(["--turns", "3"]), 64) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        ["--sizes", "2"],
        ["--damage", "swap"],
        ["--turns", "0"],
        ["--json"],
        ["--no-checkpoints"],
        ["--early-reads"],
        ["--no-checkpoints", "--cluster", "http://127.0.0.1:9"],
    ],
)
def test_wrong_arguments_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(wrong)
    assert caught.value.code == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.cluster
@pytest.mark.parametrize(("damage", "code"), [("none", 0), ("flip", 1)])
def test_real_services(damage: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes, Mooncake, etcd. With a bit flipped before a load the run ends without numbers."""
    file = tmp_path / "out.json"
    assert command.main(["--sizes", "1", "--turns", "2", "--damage", damage, "--json", str(file)]) == code
    printed = capsys.readouterr()
    if damage == "flip":
        assert "VerificationFailed" in printed.err
        assert not file.exists()
        return
    document = json.loads(file.read_text())
    (size,) = document["sizes"]
    assert size["turns"] == 2
    assert size["nbytes"] == shape_of(1).nbytes
    assert size["bytes_read_over_needed"] == 1.0
    assert size["handoff"]["median"] > 0 < size["bare"]["median"]
    assert size["ratio"] == pytest.approx(size["handoff"]["median"] / size["bare"]["median"])
    assert "1 MiB" in printed.out


def test_a_failed_reader_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's own words are what is heard, whatever its end breaks afterwards."""
    answers = [(False, "VerificationFailed: digest")]
    sent: list[Any] = []

    class Pipe:
        def send(self, message: Any) -> None:
            if sent:
                raise BrokenPipeError
            sent.append(message)

        def poll(self, seconds: float) -> bool:
            return bool(answers)

        def recv(self) -> Any:
            return answers.pop()

        def close(self) -> None:
            pass

    process = SimpleNamespace(start=lambda: None, join=lambda seconds=0: None, is_alive=lambda: False)
    context = SimpleNamespace(Pipe=lambda: (Pipe(), Pipe()), Process=lambda **arguments: process)
    monkeypatch.setattr(processes.multiprocessing, "get_context", lambda kind: context)
    run = processes.Run(None)  # type: ignore[arg-type]
    run._ask = run._stack.enter_context(processes._reader(None, "flip", "cpu"))  # type: ignore[arg-type]

    def load() -> None:
        try:
            run._ask("load")
        except BaseException as error:
            run.__exit__(type(error), error, error.__traceback__)
            raise

    with pytest.raises(processes.RunFailed, match="VerificationFailed"):
        load()
    assert sent == [("load",)]


def test_a_reader_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe:
        def send(self, message: object) -> None:
            raise BrokenPipeError

        def close(self) -> None:
            pass

    process = SimpleNamespace(start=lambda: None, join=lambda seconds=0: None, is_alive=lambda: False)
    context = SimpleNamespace(Pipe=lambda: (Pipe(), Pipe()), Process=lambda **arguments: process)
    monkeypatch.setattr(processes.multiprocessing, "get_context", lambda kind: context)
    with (
        pytest.raises(processes.RunFailed, match="ended at load"),
        processes._reader(None, "none", "cpu") as ask,  # type: ignore[arg-type]
    ):
        ask("load")


# ---- numbers


def test_stages_that_overlap_are_counted_once() -> None:
    assert covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == 4.0
    assert covered([]) == 0.0
    spans = Spans()
    assert spans.timed("put", lambda x: x + 1)(2) == 3
    assert list(spans.take()) == ["put"]
    assert spans.take() == {}


def test_a_module_without_proofs_is_refused() -> None:
    with pytest.raises(RuntimeError, match="proves nothing"), recorded_proofs(json, Spans()):
        pass


def _result() -> table.SizeResult:
    result = table.SizeResult(8, 8_000_000, 100)
    for seconds in (0.020, 0.030, 0.010):
        path = dict(
            zip(table.PATH, (seconds * share for share in (0.4, 0.2, 0.0, 0.1, 0.2, 0.1)), strict=True)
        )
        result.handoffs.append(table.Repetition(seconds, {"put": seconds / 2}, 8_000_000, path))
        early = dict(zip(table.EARLY_PATH, (seconds * 0.16,) * 5, strict=True))
        result.early.append(table.Repetition(seconds * 0.8, {"put": seconds / 2}, 8_000_000, early))
        result.bare.append((seconds / 4, seconds / 4))
        result.etcd.append((0.006, 0.002))
    return result


def test_ratio_and_floor() -> None:
    result = _result()
    assert result.ratio == pytest.approx(2.0)
    assert result.best_ratio == pytest.approx(2.0)
    assert result.early_ratio == pytest.approx(1.6)
    assert sum(result.early_path().values()) == pytest.approx(0.016)
    # Bare 5 + 5 ms; two copies at 8 GB/s and two reads at 16 GB/s of 8 MB are 3 ms; etcd 6 + 2 ms.
    assert result.serial(8e9, 16e9) == pytest.approx(0.021)
    # The put, then the commit (longer than the get), then one copy.
    assert result.least(8e9) == pytest.approx(0.012)
    result.etcd = [(0.001, 0.002)]
    assert result.least(8e9) == pytest.approx(0.011), "the get is longer than the commit"
    values = result.to_dict(8e9, 16e9)
    assert values["handoff"] == {"min": 0.01, "p25": 0.015, "median": 0.02, "p75": 0.025}
    assert values["stages"]["put"] == pytest.approx(0.01)
    assert values["stages"]["get"] == 0.0


def test_the_table_has_a_column_a_size() -> None:
    lines = table.handoff_table([_result()], 8e9, 16e9).splitlines()
    assert lines[1].split()[:3] == ["8", "MiB", "8000000"]
    assert "20.00 [15.00, 25.00]" in lines[1]
    assert "2.00" in lines[1].split()
    assert any(line.split() == ["put", "10.00"] for line in lines)
    assert len({len(line) for line in table.render(("a", "b"), [("x", "1"), ("yy", "22")]).splitlines()}) == 1


def test_what_is_beyond_bare_adds_up_to_the_ratio() -> None:
    result = _result()
    assert sum(result.path().values()) == pytest.approx(0.020)
    beyond = result.beyond()
    assert 1 + sum(beyond.values()) == pytest.approx(result.ratio)
    # Of 20 ms against bare 5 + 5: written 8, etcd 6, copied and checked 4, in the cache 2.
    assert list(beyond.values()) == pytest.approx([0.3, 0.6, 0.0, -0.1, 0.2])
    lines = table.handoff_table([result], 8e9, 16e9).splitlines()
    assert any(line.split() == ["etcd:", "commit", "and", "record", "+0.60"] for line in lines)
    assert any(line.split() == ["together", "20.00"] for line in lines)


def test_a_slow_turn_does_not_shift_the_path() -> None:
    result = _result()
    for _ in range(5):
        result.handoffs.append(result.handoffs[0])
    before = result.path()
    result.handoffs.append(table.Repetition(9.0, {}, 1, dict.fromkeys(table.PATH, 1.5)))
    assert result.path() == pytest.approx(before)


# ---- whole requests


class _Endpoint:
    """Answers with traces: 300 ms handed over (250 to the commit), 200 ms local."""

    def __init__(self, from_store: int = 0) -> None:
        self.asked: list[tuple[int, str]] = []
        self.missing = from_store

    def complete(self, case: Any, placement: str, salt: str) -> Any:
        assert salt
        self.asked.append((case.length, placement))
        handover = placement == "handover"
        return None, {
            "first_token_after": 0.3 if handover else 0.2,
            "published_after": 0.25 if handover else None,
            "from_store": case.length - 1 - self.missing if handover else 0,
            "boundary_bytes": 1000,
        }


def test_the_share_of_the_time_to_the_first_token() -> None:
    endpoint = _Endpoint()
    results = cluster.measure(endpoint, turns=2)  # type: ignore[arg-type]
    assert [result.length for result in results] == [500, 2000, 8000]
    for result in results:
        assert len(result.handover) == len(result.local) == 2
        assert result.share == pytest.approx(1 / 3)
        assert result.after_commit() == pytest.approx(0.05)
        assert result.share_after_commit == pytest.approx(1 / 6)
    assert len(endpoint.asked) == 3 * 3 * 2
    lines = cluster.table(results).splitlines()
    assert [line.split()[-2:] for line in lines[1:]] == [["33%", "16.7%"]] * 3


@pytest.mark.parametrize(
    ("flags", "options", "early"),
    [([], {}, False), (["--no-checkpoints"], {"checkpoint_bytes": 0}, False), (["--early-reads"], {}, True)],
)
def test_a_started_cluster_leaves_checkpoints_unless_told_otherwise(
    flags: list[str], options: dict[str, Any], early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    class Started:
        endpoint = "http://127.0.0.1:9"

        def __init__(self, config: Any) -> None:
            started.append(config)

        def __enter__(self) -> Started:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(cluster, "Cluster", Started)
    monkeypatch.setattr(cluster, "Endpoint", lambda url: _Endpoint())
    assert command.main(["--cluster", "--quick", *flags]) == 0
    (config,) = started
    assert config.prefill_options == options
    assert config.router_options == {"early_reads": early}


def test_a_prompt_that_was_not_handed_over_is_not_measured() -> None:
    with pytest.raises(RuntimeError, match="took 498 from the store"):
        cluster.measure(_Endpoint(from_store=1), turns=1)  # type: ignore[arg-type]


def test_tokens_are_in_the_vocabulary() -> None:
    config = json.loads((Path(__file__).parents[3] / "models/demo/config.json").read_text())
    assert max(cluster._TOKENS) < config["vocab_size"]
    assert np.unique(list(cluster._TOKENS)).size > 100
