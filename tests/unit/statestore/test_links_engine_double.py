# SPDX-License-Identifier: Apache-2.0
"""Links and chains through vLLM's own scheduler, with ranks of several layouts and a model whose every answer depends
on every byte of its state.

What the plain requests of test_scheduler_half.py cannot show: the blocks that vLLM really hands out, recycles, and
takes from a request that it preempts.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from deltaserve.config import StoreConfig, WorkerConfig
from statestore.boundary import BoundaryRecord, Epoch, RankEntry
from statestore.connector.describe import geometry_of
from statestore.connector.events import listen
from statestore.connector.intents import PARAMS, Intents, LoadIntent, PublishIntent, PublishOutcome
from statestore.connector.pins import Pins
from statestore.geometry import Geometry
from tests.doubles.engine import MODEL_DIGEST, EngineDouble
from tests.doubles.pool import Store
from tests.doubles.toy_model import ToyModel
from tests.support.core_requests import core_request

BLOCK = 32
CHUNK = 64
LENGTH = 230
MODEL = ToyModel()


class Worker:
    """One engine of a layout, and what its connector said."""

    def __init__(
        self,
        store: Store,
        tp: int,
        dcp: int = 1,
        interleave: int = 1,
        blocks: int = 96,
        one_pass: bool = False,
    ) -> None:
        self.name = f"test-{uuid.uuid4().hex}"
        config = WorkerConfig(
            role="decode",
            tp=tp,
            dcp=dcp,
            dcp_interleave=interleave,
            max_model_len=1024,
            max_num_batched_tokens=512 if one_pass else CHUNK,
            load_timeout=5.0,
            store=StoreConfig(segment_bytes=16 << 20),
        )
        self.events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.outputs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        listen(self.name, lambda *event: self.events.put(event))
        self.engine = EngineDouble(
            config,
            self.name,
            store,
            model=MODEL,
            block_size=BLOCK,
            blocks=blocks,
            checkpoints=one_pass,
            on_step=self._step,
        )
        self.geometry: Geometry = geometry_of(
            self.engine.vllm_config, self.engine.kv_cache_config, MODEL_DIGEST
        )
        self._names = iter(range(1, 1 << 20))

    def _step(self, batches: list[Any]) -> None:
        for batch in batches:
            for output in batch.outputs:
                self.outputs.put(output)

    def start(self, prompt: Sequence[int], tokens: int, **intents: Any) -> str:
        name = f"r{next(self._names)}"
        params = SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {PARAMS: Intents(**intents)}} if intents else None,
        )
        request = core_request(name, prompt, params)
        self.engine.add(request)
        return name

    def tokens(self, name: str) -> list[int]:
        found: list[int] = []
        while True:
            output = self.outputs.get(timeout=20)
            if output.request_id != name:
                continue
            found += output.new_token_ids
            if output.finish_reason is not None:
                return found

    def event(self, kind: str, name: str) -> Any:
        """What the connector says of a request, other than what is not asked for."""
        while True:
            event = self.events.get(timeout=20)
            if event[:2] == (kind, name):
                return event[2:]

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        assert self.engine.call(lambda engine: engine.scheduler.reset_prefix_cache()).result(20)

    def answer(self, prompt: Sequence[int], tokens: int = 3, **intents: Any) -> list[int]:
        return self.tokens(self.start(prompt, tokens, **intents))

    def publish(self, prompt: Sequence[int], base: int = 0, **intents: Any) -> PublishOutcome:
        intent = PublishIntent(_epoch(), len(prompt), base=base, checkpoint_tokens=BLOCK)
        (outcome,) = self.event("written", self.start(prompt, 1, publish=intent, **intents))
        assert isinstance(outcome, PublishOutcome)
        return outcome

    def commit(
        self, outcome: PublishOutcome, parents: Sequence[BoundaryRecord] = ()
    ) -> tuple[BoundaryRecord, ...]:
        """The chain that a role would make of an outcome."""
        chain = list(parents)
        for link in outcome.links:
            record = BoundaryRecord(
                id=f"b.{outcome.epoch}.{link.link}",
                model_digest=MODEL_DIGEST,
                prefix_hash="ab",
                length=link.length,
                epoch=outcome.epoch,
                owner=self.name,
                geometry=self.geometry.to_json(),
                state="committed",
                ranks=tuple(RankEntry(r.rank, "written", tuple(r.objects)) for r in link.reports),
                base=link.base,
                parents=tuple(one.id for one in chain),
                link=link.link,
                reusable=True,
            )
            chain.append(record)
        return tuple(chain)


def _epoch() -> Epoch:
    return Epoch(7, random.getrandbits(40))


def prompt(length: int = LENGTH) -> list[int]:
    return random.choices(range(3, 900), k=length)


class Cluster:
    """Workers of several layouts on one store."""

    def __init__(self) -> None:
        self.store = Store()
        self.workers: list[Worker] = []

    def worker(
        self, tp: int, dcp: int = 1, interleave: int = 1, blocks: int = 96, one_pass: bool = False
    ) -> Worker:
        made = Worker(self.store, tp, dcp, interleave, blocks, one_pass)
        self.workers.append(made)
        return made

    def close(self) -> None:
        self.store.before = lambda operation, key: None
        for worker in self.workers:
            worker.engine.stop()
            listen(worker.name, None)
            assert worker.engine.failure is None


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def test_every_prefix_of_a_chain_restores_in_another_layout(cluster: Cluster) -> None:
    source, target = cluster.worker(tp=4), cluster.worker(tp=8, dcp=4, interleave=2)
    asked = prompt()
    chain = source.commit(source.publish(asked[:-1]))
    assert [record.length for record in chain] == [64, 128, 192, 224, 229]
    for end in range(1, len(chain) + 1):
        again = cluster.worker(tp=2) if end == 3 else target
        again.forget()
        name = again.start(asked, 3, load=LoadIntent(chain[:end]))
        assert again.event("restored", name)[0] == chain[end - 1].length
        assert again.tokens(name) == MODEL.answer(asked, 3)


def test_a_conversation_over_three_layouts(cluster: Cluster) -> None:
    """Prompt on one worker, answer and its end on a second, the next prompt on a third, its answer on the second."""
    first, second, third = (
        cluster.worker(tp=4),
        cluster.worker(tp=4, dcp=2, interleave=8),
        cluster.worker(tp=1),
    )
    asked = prompt()
    chain = first.commit(first.publish(asked[:-1]))
    name = second.start(
        asked, 40, load=LoadIntent(chain), publish=PublishIntent(_epoch(), None, base=chain[-2].length)
    )
    answer = second.tokens(name)
    (ended,) = second.event("written", name)
    assert answer == MODEL.answer(asked, 40)
    talk = [*asked, *answer]
    assert ended.tokens == talk[:-1]
    kept = second.commit(ended, chain[:-1])
    talk += prompt(70)
    outcome = third.publish(talk[:-1], kept[-1].length, load=LoadIntent(kept))
    assert outcome.base == len(asked) + 39
    whole = third.commit(outcome, kept)
    assert second.answer(talk, 5, load=LoadIntent(whole)) == MODEL.answer(talk, 5)
    # A worker that has seen nothing of it, so that every row comes from the store.
    assert cluster.worker(tp=8, dcp=8).answer(talk, 5, load=LoadIntent(whole)) == MODEL.answer(talk, 5)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 95, 96, 97, 128])
def test_lengths_at_the_edges(cluster: Cluster, length: int) -> None:
    """A boundary of `length` tokens and, from its end, the end of an answer."""
    source, target = cluster.worker(tp=2), cluster.worker(tp=2, dcp=2)
    asked = prompt(length + 1)
    chain = source.commit(source.publish(asked[:-1]))
    assert chain[-1].length == length
    name = target.start(
        asked, 33, load=LoadIntent(chain), publish=PublishIntent(_epoch(), None, base=chain[-1].base)
    )
    answer = target.tokens(name)
    assert answer == MODEL.answer(asked, 33)
    kept = target.commit(target.event("written", name)[0], chain[:-1])
    talk = [*asked, *answer, 5]
    assert source.answer(talk, 2, load=LoadIntent(kept)) == MODEL.answer(talk, 2)


# ---- states that are taken inside a pass


@pytest.mark.parametrize("length", [65, 80, 81, 96, 97, 127, 129, 200, 229])
def test_one_pass_leaves_a_checkpoint_that_restores_in_another_layout(cluster: Cluster, length: int) -> None:
    source, target = cluster.worker(tp=4, one_pass=True), cluster.worker(tp=8, dcp=4, interleave=2)
    asked = prompt(length + 1)
    outcome = source.publish(asked[:-1])
    assert (outcome.passes.steps, outcome.passes.computed, outcome.passes.again) == (1, length, 0)
    chain = source.commit(outcome)
    assert [record.length for record in chain] == [(length - 1) // 16 * 16, length]
    for end in (1, 2):
        target.forget()
        assert target.answer(asked, 3, load=LoadIntent(chain[:end])) == MODEL.answer(asked, 3)


def test_prompts_go_on_from_a_checkpoint_in_one_pass_again(cluster: Cluster) -> None:
    source, other = cluster.worker(tp=2, one_pass=True), cluster.worker(tp=4, one_pass=True)
    talk = prompt()
    kept: tuple[BoundaryRecord, ...] = ()
    for _ in range(4):
        for worker in (source, other):
            worker.forget()
            base = kept[-1].length if kept else 0
            load = {"load": LoadIntent(kept)} if kept else {}
            outcome = worker.publish(talk[:-1], base, **load)
            assert (outcome.passes.steps, outcome.passes.computed) == (1, len(talk) - 1 - base)
            chain = worker.commit(outcome, kept)
            source.forget()
            assert source.answer(talk, 3, load=LoadIntent(chain)) == MODEL.answer(talk, 3)
            kept = chain[:-1]
            talk += prompt(random.randrange(97, 130))


def test_a_prompt_in_one_block_has_none(cluster: Cluster) -> None:
    source = cluster.worker(tp=2, one_pass=True)
    for length in (16, 17, 31, 32):
        assert [link.length for link in source.publish(prompt(length)).links] == [length]


def test_another_block_under_its_name_is_felt(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the slot before it in the table, or the state that the pass ends with."""
    from statestore.connector import scheduler_half
    from statestore.connector.inside import Inside, last_inside

    def ends(*arguments: Any) -> Inside | None:
        inside = last_inside(*arguments)
        tables = arguments[2]
        return inside and Inside(inside.length, {group: tables[group][-1] for group in inside.blocks})

    monkeypatch.setattr(scheduler_half, "last_inside", ends)
    source = cluster.worker(tp=2, one_pass=True)
    asked = prompt()
    chain = source.commit(source.publish(asked[:-1]))
    source.forget()
    assert source.answer(asked, 3, load=LoadIntent(chain[:1])) != MODEL.answer(asked, 3)
    source.forget()
    assert source.answer(asked, 3, load=LoadIntent(chain)) == MODEL.answer(asked, 3)


# ---- blocks that vLLM takes back while they are read


class Gate:
    """Holds one rank's writes before it reads the cache."""

    def __init__(self, worker: Worker, rank: int) -> None:
        self._open = threading.Event()
        self._segment = worker.engine.pools[rank].segment_name
        self.held = threading.Event()

    def __call__(self, operation: str, key: str) -> None:
        if operation == "staging" and key == self._segment:
            self.held.set()
            assert self._open.wait(30)

    def open(self) -> None:
        self._open.set()


def two_steps(worker: Worker, gate: Gate) -> None:
    """Wait until the engine, which holds after two steps, has made them, and a rank is held."""
    assert gate.held.wait(30)
    deadline = time.monotonic() + 20
    while worker.engine.steps < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def preempted_while_links_are_out(cluster: Cluster) -> bool:
    """A request loses its blocks to others while a rank still has to read them; whether its chain is right."""
    source = cluster.worker(tp=2, blocks=40)
    gate = Gate(source, 1)
    cluster.store.before = gate
    asked = prompt()
    intent = PublishIntent(_epoch(), LENGTH - 1, checkpoint_tokens=BLOCK)
    source.engine.hold(after=2)
    name = source.start(asked[:-1], 1, publish=intent)
    two_steps(source, gate)

    def preempt(engine: EngineDouble) -> int:
        request = engine.scheduler.running.pop()
        assert (request.request_id, request.num_computed_tokens) == (name, 128)
        engine.scheduler._preempt_request(request, time.monotonic())
        engine.scheduler.waiting.remove_request(request)
        engine.parked = request  # type: ignore[attr-defined]
        return engine.free_blocks

    source.engine.call(preempt).result(20)
    source.engine.go()
    for _ in range(4):
        source.answer(prompt(), 1)
    source.engine.call(lambda engine: engine.scheduler.waiting.prepend_request(engine.parked)).result(20)
    source.tokens(name)
    gate.open()
    (outcome,) = source.event("written", name)
    if not outcome.complete:
        return False
    chain = source.commit(outcome)
    target = cluster.worker(tp=1)
    for end in (1, 2, len(chain)):
        target.forget()
        if target.answer(asked, 3, load=LoadIntent(chain[:end])) != MODEL.answer(asked, 3):
            return False
    return True


def test_a_preempted_requests_links_are_whole(cluster: Cluster) -> None:
    assert preempted_while_links_are_out(cluster)
    free = cluster.workers[0].engine.free_blocks
    assert free == 39, "pins were not given back"


def test_without_pins_they_are_not(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def pin_nothing(self: Pins, name: Any, request_id: str, spans: Any) -> None:
        self._blocks[name] = []

    monkeypatch.setattr(Pins, "pin", pin_nothing)
    assert not preempted_while_links_are_out(cluster)


def test_without_pins_of_states_they_are_not(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows alone are not enough."""
    pin = Pins.pin

    def pin_rows(self: Pins, name: Any, request_id: str, spans: Any) -> None:
        pin(
            self,
            name,
            request_id,
            [
                (1, 0) if first == last and number < len(spans) - 1 else (first, last)
                for number, (first, last) in enumerate(spans)
            ],
        )

    monkeypatch.setattr(Pins, "pin", pin_rows)
    assert not preempted_while_links_are_out(cluster)


def test_an_abort_with_links_out_returns_every_block(cluster: Cluster) -> None:
    source = cluster.worker(tp=4)
    free = source.engine.free_blocks
    gate = Gate(source, 2)
    cluster.store.before = gate
    source.engine.hold(after=2)
    name = source.start(
        prompt()[:-1], 1, publish=PublishIntent(_epoch(), LENGTH - 1, checkpoint_tokens=BLOCK)
    )
    two_steps(source, gate)
    source.engine.abort([name])
    source.engine.call(lambda engine: None).result(20)
    assert source.engine.free_blocks < free, "the control: a rank still reads them"
    gate.open()
    source.engine.go()
    (outcome,) = source.event("written", name)
    assert (outcome.complete, outcome.failure) == (False, "aborted")
    assert [link.length for link in outcome.links] == [64, 128]
    assert source.engine.call(lambda engine: engine.free_blocks).result(20) == free
    chain = source.commit(outcome)
    assert len(chain) == 2
