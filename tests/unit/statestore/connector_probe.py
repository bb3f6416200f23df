# SPDX-License-Identifier: Apache-2.0
"""Links and chains in one real engine: publish a prompt of several chunks, restore from its links, compare.

A process of its own (`python -m tests.unit.statestore.connector_probe [ahead]`): an engine leaves its settings in the
process that it ran in. The engine is vLLM's with this project's connector on it; the store is the double in memory, so
that neither etcd nor Mooncake is needed. Prints one line of JSON, `PROBE {...}`; test_connector_engine.py says what
must hold.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Sequence
from typing import Any
from unittest import mock

from deltaserve.config import WorkerConfig
from deltaserve.engine.arguments import connector_config, engine_args, set_environment
from statestore.boundary import BoundaryRecord, Epoch, RankEntry
from statestore.connector.intents import PARAMS, Intents, LinkOutcome, LoadIntent, PublishIntent
from tests.doubles.pool import PoolDouble, Store
from tests.support import steps_ahead
from tests.support.cluster import DEMO
from tests.support.core_requests import core_request

WORKER = "probe"
DIGEST = "0123456789abcdef"
CHUNK = 256
BLOCKS = 64
ANSWER = 8


class Probe:
    """One engine, and what the tests do with it."""

    def __init__(self, chunk: int = CHUNK, ahead: bool = False, **extra: Any) -> None:
        """`chunk`: most tokens of a step; `ahead`: steps are scheduled one ahead, and reports told between them;
        `extra`: further engine arguments."""
        config = WorkerConfig(
            role="prefill",
            model=DEMO,
            max_model_len=2048,
            max_num_seqs=4,
            max_num_batched_tokens=chunk,
            kv_cache_bytes=64 << 20,
            omp_threads="nobind",
            # Few blocks, so that a few requests reuse all of them.
            extra_args={"num_gpu_blocks_override": BLOCKS, **extra},
        )
        set_environment(config)
        from vllm.engine.arg_utils import AsyncEngineArgs

        from deltaserve.engine.host import EngineHost
        from statestore.connector import at_once
        from statestore.connector.describe import geometry_of
        from statestore.connector.events import listen

        self.store = Store()
        self.events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.outputs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._names = iter(range(1, 1 << 20))
        self._epochs = iter(range(1, 1 << 20))
        listen(WORKER, lambda *event: self.events.put(event))
        args = engine_args(config, connector_config(config, WORKER, DIGEST))
        vllm_config = AsyncEngineArgs(**args).create_engine_config()
        if ahead:
            steps_ahead.allow(vllm_config)
        between = {"between_steps": at_once.tell} if ahead else {}
        self.host = EngineHost(
            vllm_config, self._step, lambda reason: self.outputs.put(RuntimeError(reason)), **between
        )
        with mock.patch("statestore.mooncake_pool.MooncakePool", self._pool):
            self.host.start(300)
        core = self.host.core
        self.geometry = geometry_of(core.vllm_config, core.scheduler.kv_cache_config, DIGEST)
        self.block = self.geometry.block_size

    def _pool(self, config: Any, **options: Any) -> PoolDouble:
        return PoolDouble(self.store, config.segment_bytes)

    def _step(self, batches: list[Any]) -> None:
        for batch in batches:
            for output in batch.outputs:
                self.outputs.put(output)

    # ---- requests

    def run(
        self, prompt: Sequence[int], tokens: int = ANSWER, stop: Sequence[int] = (), **intents: Any
    ) -> dict[str, Any]:
        """One request to its end: tokens, their log-probs, tokens that were computed nowhere else, events by name."""
        name = self.start(prompt, tokens, stop, **intents)
        return self.result(name, waits="publish" in intents)

    def start(self, prompt: Sequence[int], tokens: int, stop: Sequence[int] = (), **intents: Any) -> str:
        """`stop`: tokens that end the answer."""
        from vllm import SamplingParams

        name = f"probe-{next(self._names)}"
        extra = {"kv_transfer_params": {PARAMS: Intents(**intents)}} if intents else None
        params = SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            logprobs=1,
            ignore_eos=True,
            stop_token_ids=list(stop),
            extra_args=extra,
        )
        request = core_request(name, prompt, params)
        self.host.add(request, lambda reason: self.outputs.put(RuntimeError(reason)))
        return name

    def result(self, name: str, waits: bool) -> dict[str, Any]:
        """Collects a request's outputs, and (`waits`) the event that its publish is over."""
        found: dict[str, Any] = {"tokens": [], "logprobs": [], "cached": None, "events": {}}
        ended = False
        while not ended:
            output = self.outputs.get(timeout=120)
            if isinstance(output, Exception):
                raise output
            if output.request_id != name:
                continue
            found["tokens"] += list(output.new_token_ids)
            if output.new_logprobs is not None:
                found["logprobs"] += [float(row[0]) for row in output.new_logprobs.logprobs]
            if output.prefill_stats is not None:
                stats = output.prefill_stats
                found["cached"] = [stats.num_local_cached_tokens, stats.num_external_cached_tokens]
            ended = output.finish_reason is not None
        while waits or not self.events.empty():
            event = self.events.get(timeout=60)
            if event[1] == name:
                found["events"][event[0]] = event[2:]
                waits = waits and event[0] not in ("written", "publish_failed")
        return found

    def forget(self) -> None:
        """Empty the engine's own prefix cache; fails when a block is still in use."""
        assert self.host.call(lambda core: core.reset_prefix_cache()).result(30), "blocks are still in use"

    def used_blocks(self) -> int:
        pool = self.host.core.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - pool.get_num_free_blocks())

    # ---- boundaries

    def intent(self, length: int | None, **options: Any) -> PublishIntent:
        return PublishIntent(Epoch(7, next(self._epochs)), length, **options)

    def commit(
        self, epoch: Epoch, links: Sequence[LinkOutcome], parents: Sequence[BoundaryRecord] = ()
    ) -> list[BoundaryRecord]:
        """What a role would commit: the records of the links, resting on `parents`; returns the whole chain."""
        chain = list(parents)
        for link in links:
            record = BoundaryRecord(
                id=f"b.{epoch}.{link.link}",
                model_digest=DIGEST,
                prefix_hash="ab",
                length=link.length,
                epoch=epoch,
                owner=WORKER,
                geometry=self.geometry.to_json(),
                state="committed",
                ranks=tuple(RankEntry(r.rank, "written", tuple(r.objects)) for r in link.reports),
                base=link.base,
                parents=tuple(one.id for one in chain),
                link=link.link,
                reusable=True,
            )
            chain.append(record)
        return chain

    def publish(self, prompt: Sequence[int], parents: Sequence[BoundaryRecord] = (), **intents: Any) -> Any:
        """Publish all of `prompt` with checkpoints on the way; (outcome, chain)."""
        base = parents[-1].length if parents else 0
        intent = self.intent(len(prompt), checkpoint_tokens=self.block, base=base)
        (outcome,) = self.run(prompt, 1, publish=intent, **intents)["events"]["written"]
        return outcome, self.commit(outcome.epoch, outcome.links, parents if outcome.base else ())


def digests(chain: Sequence[BoundaryRecord]) -> list[list[str]]:
    """The digests of every object of every record."""
    return [[digest for entry in record.objects() for digest in entry.digests] for record in chain]


def answer(result: dict[str, Any]) -> dict[str, Any]:
    """What of a result goes into the report."""
    restored = result["events"].get("restored")
    return {
        "tokens": result["tokens"],
        "logprobs": result["logprobs"],
        "cached": result["cached"],
        "restored": restored and restored[0],
        "failures": [report.failure for report in restored[1] if report.failure] if restored else [],
    }


def from_each_link(probe: Probe, prompt: list[int], chain: Sequence[Any]) -> list[dict[str, Any]]:
    """The prompt's answers from its chain's first link, from the first two, and so on."""
    answers = []
    for end in range(len(chain)):
        probe.forget()
        answers.append(answer(probe.run(prompt, load=LoadIntent(tuple(chain[: end + 1])))))
    return answers


def chains(probe: Probe, prompt: list[int], more: list[int]) -> dict[str, Any]:
    """Restore one prompt from each of its links; then a second turn from the end of the answer."""
    probe.forget()
    plain = probe.run(prompt)
    probe.forget()
    outcome, chain = probe.publish(prompt[:-1])
    found: dict[str, Any] = {
        "plain": answer(plain),
        "links": [[link.base, link.length] for link in outcome.links],
        "complete": outcome.complete,
        "bytes": [link.nbytes for link in outcome.links],
        "from_link": from_each_link(probe, prompt, chain),
    }
    # The engine's own prefix cache now holds more than the first checkpoint: nothing is loaded.
    probe.forget()
    probe.run(prompt, 1)
    found["local"] = answer(probe.run(prompt, load=LoadIntent(tuple(chain[:1]))))
    # A second publish rests on the first checkpoint, and is read with it.
    probe.forget()
    again, rested = probe.publish(prompt[:-1], chain[:1], load=LoadIntent(tuple(chain[:1])))
    found["rested"] = {
        "base": again.base,
        "links": [[link.base, link.length] for link in again.links],
        "same_rows": _rows(probe, rested) == _rows(probe, chain),
    }
    probe.forget()
    found["from_rested"] = answer(probe.run(prompt, load=LoadIntent(tuple(rested))))
    # The answer's end, from the whole boundary; then the next turn.
    probe.forget()
    turn = probe.run(prompt, load=LoadIntent(tuple(chain)), publish=probe.intent(None, base=chain[-2].length))
    (end,) = turn["events"]["written"]
    kept = probe.commit(end.epoch, end.links, chain[:-1])
    talk = [*prompt, *turn["tokens"], *more]
    probe.forget()
    found["answer"] = {
        "length": end.length,
        "base": end.base,
        "tokens": end.tokens == talk[: end.length],
        "prompt_and_answer": len(prompt) + len(turn["tokens"]),
    }
    found["next_plain"] = answer(probe.run(talk))
    probe.forget()
    found["next"] = answer(probe.run(talk, load=LoadIntent(tuple(kept))))
    # A chain whose middle is lost: refused, computed here, and published from the start.
    probe.forget()
    lost = chain[1].objects()[-1].key
    stored = probe.store.objects.pop(lost)
    base = chain[-2].length
    failed = probe.run(
        prompt[:-1], 1, load=LoadIntent(tuple(chain[:-1])), publish=probe.intent(len(prompt) - 1, base=base)
    )
    probe.store.objects[lost] = stored
    (whole,) = failed["events"]["written"]
    found["after_failure"] = {
        **answer(failed),
        "base": whole.base,
        "complete": whole.complete,
        "links": [[link.base, link.length] for link in whole.links],
    }
    probe.forget()
    found["from_whole"] = answer(
        probe.run(prompt, load=LoadIntent(tuple(probe.commit(whole.epoch, whole.links))))
    )
    return found


def _rows(probe: Probe, chain: Sequence[BoundaryRecord]) -> bytes:
    """Latent rows of a chain in token order (one rank wrote them, in plain order)."""
    return b"".join(
        probe.store.objects[entry.key].data.tobytes()
        for record in chain
        for entry in record.objects()
        if entry.group == "mla"
    )


def held(probe: Probe, prompt: list[int], fillers: list[list[int]], pinned: bool) -> dict[str, Any]:
    """Publish while the ranks' threads are held until other requests have been through the whole cache."""
    from statestore.connector.pins import Pins
    from statestore.connector.publishing import Publisher

    gate = threading.Event()
    publish = Publisher.publish
    pin = Pins.pin

    def wait(self: Any, job: Any, report: Any, **steps: Any) -> None:
        gate.wait(120)
        publish(self, job, report, **steps)

    def pin_nothing(self: Any, name: Any, request_id: str, spans: Any) -> None:
        self._blocks[name] = []

    probe.forget()
    with (
        mock.patch.object(Publisher, "publish", wait),
        mock.patch.object(Pins, "pin", pin if pinned else pin_nothing),
    ):
        intent = probe.intent(len(prompt), checkpoint_tokens=probe.block)
        name = probe.start(prompt, 1, publish=intent)
        probe.result(name, waits=False)
        used = probe.used_blocks()
        for filler in fillers:
            probe.run(filler, 1)
        gate.set()
        while True:
            event = probe.events.get(timeout=120)
            if event[:2] == ("written", name):
                break
    outcome = event[2]
    return {
        "used": used,
        "failure": outcome.failure,
        "digests": digests(probe.commit(outcome.epoch, outcome.links)),
    }


def main() -> None:
    probe = Probe(ahead="ahead" in sys.argv)
    prompts = [p["prompt"] for p in json.loads((DEMO / "prompts.json").read_text()) if p["length"] == 1000]
    first, second, more = prompts[0][:700], prompts[1][:700], prompts[2][:70]
    aligned = first[: 5 * probe.block + 1]
    found: dict[str, Any] = {
        "block": probe.block,
        "unaligned": chains(probe, second, more),
        "aligned": chains(probe, aligned, more),
    }
    probe.forget()
    _, chain = probe.publish(first[:-1])
    found["quiet"] = {"digests": digests(chain)}
    # Control of all comparisons: another prompt's state gives another answer.
    probe.forget()
    found["foreign"] = answer(probe.run(second, load=LoadIntent(tuple(chain))))
    fillers = [[(7 * i + n) % 200 + 3 for i in range(1000)] for n in range(1, 6)]
    found["held"] = held(probe, first[:-1], fillers, pinned=True)
    probe.forget()
    found["used_after"] = probe.used_blocks()
    found["unpinned"] = held(probe, first[:-1], fillers, pinned=False)
    print("PROBE " + json.dumps(found), flush=True)
    probe.host.stop(10)


if __name__ == "__main__":
    main()
