# SPDX-License-Identifier: Apache-2.0
"""An engine simulator: one made-up token a step for every request, at a fixed pace, whatever the router can bear.

    python -m benchmarks.router.engine --step-ms 20 [--zmq INPUT OUTPUT]

serves two sides and prints their addresses as one line of JSON: `grpc`, a decode worker of this cluster
(deltaserve/wire/worker.proto), and `http`, an OpenAI server that streams the same tokens as text. With `--zmq` it is
also the engine core of a vLLM front end, over vLLM's own protocol. It ends when its stdin does.

A request for more than IDLE tokens gets one and then nothing: an idle stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import uvloop
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats

from benchmarks.router.http_engine import HttpEngine, steps
from deltaserve.wire import codec
from deltaserve.wire import worker_pb2 as pb
from deltaserve.wire.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

IDLE = 8000
WORKER_ID, DIGEST = "simulator", "simulated"
TOKENS = range(300, 600)
"""Ids that are whole words in the demonstration model's tokenizer."""


@dataclass(slots=True)
class Request:
    """One that is running; `leg` is its name on its side."""

    leg: Any
    limit: int
    prompt_tokens: int
    made: int = 0

    def step(self) -> EngineCoreOutput | None:
        """The output of one step, None when it is idle."""
        if self.limit > IDLE and self.made:
            return None
        self.made += 1
        token = TOKENS[(self.made * 7919) % len(TOKENS)]
        finish = FinishReason.LENGTH if self.made >= self.limit else None
        output = EngineCoreOutput("", [token], finish_reason=finish)
        if self.made == 1:
            output.prefill_stats = PrefillStats(
                num_prompt_tokens=self.prompt_tokens, num_computed_tokens=self.prompt_tokens
            )
        return output


class Steps:
    """Makes the steps of one side while it has requests."""

    def __init__(self, seconds: float, deliver: Callable[[list[tuple[Any, EngineCoreOutput]]], None]) -> None:
        self.running: dict[Any, Request] = {}
        self._seconds = seconds
        self._deliver = deliver
        self._work = asyncio.Event()

    def add(self, request: Request) -> None:
        """Begin with a request."""
        self.running[request.leg] = request
        self._work.set()

    async def run(self) -> None:
        """Make steps for ever."""
        async for _ in steps(self._seconds, self.running, self._work):
            outputs = []
            for leg, request in list(self.running.items()):
                output = request.step()
                if output is None:
                    continue
                outputs.append((leg, output))
                if output.finish_reason is not None:
                    del self.running[leg]
            if outputs:
                self._deliver(outputs)


class Worker(WorkerServicer):
    """The decode worker's side."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.WorkerDescription:
        return pb.WorkerDescription(
            worker_id=WORKER_ID,
            role="decode",
            model_digest=DIGEST,
            max_model_len=16384,
            max_num_seqs=4096,
            bundles=True,
        )

    async def Engine(
        self, requests: AsyncIterator[pb.ToWorker], context: Any
    ) -> AsyncIterator[pb.FromWorker]:
        out: asyncio.Queue[pb.FromWorker] = asyncio.Queue()
        steps = Steps(self._seconds, lambda made: out.put_nowait(pb.FromWorker(step=codec.encode_step(made))))
        tasks = [asyncio.create_task(steps.run()), asyncio.create_task(self._read(requests, steps))]
        try:
            while True:
                yield await out.get()
        finally:
            for task in tasks:
                task.cancel()

    @staticmethod
    async def _read(requests: AsyncIterator[pb.ToWorker], steps: Steps) -> None:
        async for some in requests:
            for message in codec.unbundled(some):
                if message.HasField("add"):
                    add = message.add
                    limit = codec.decode_sampling(add.sampling).max_tokens or 16
                    steps.add(Request(add.id, limit, len(add.prompt)))
                elif message.HasField("abort"):
                    for leg in message.abort.ids:
                        steps.running.pop(leg, None)


class Core:
    """The engine core's side: what a virtual engine core asks of a dispatcher (router/faces/virtual_core.py)."""

    def __init__(self, seconds: float) -> None:
        self.steps = Steps(seconds, self._deliver)
        self._sinks: dict[str, Any] = {}

    def add(self, request: EngineCoreRequest, sink: Any = None) -> None:
        """Begin with a request."""
        params = request.sampling_params
        assert params is not None
        prompt = len(request.prompt_token_ids or ())
        made = Request(request.request_id, params.max_tokens or 16, prompt)
        self._sinks[request.request_id] = sink
        self.steps.add(made)

    def abort(self, request_ids: Any, stopped: bool = False) -> None:
        """Forget requests."""
        for request_id in request_ids:
            self.steps.running.pop(request_id, None)
            self._sinks.pop(request_id, None)

    def _deliver(self, made: list[tuple[Any, EngineCoreOutput]]) -> None:
        for request_id, output in made:
            output.request_id = request_id
            sink = self._sinks.get(request_id)
            if output.finish_reason is not None:
                self._sinks.pop(request_id, None)
            if sink is not None:
                sink.take(output)


async def _main(options: argparse.Namespace) -> None:
    seconds = options.step_ms / 1e3
    server = grpc.aio.server(options=codec.SERVER_OPTIONS)
    add_WorkerServicer_to_server(Worker(seconds), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    words = [options.tokenizer.decode([token]) for token in TOKENS]
    http = HttpEngine(seconds, words, IDLE)
    http_port = await http.start()
    if options.zmq:
        from router.faces.virtual_core import VirtualCore

        core = Core(seconds)
        stepping = asyncio.create_task(core.steps.run())
        virtual = VirtualCore(core, *options.zmq, max_model_len=16384, vllm_version=options.vllm_version)
        virtual.start()
    print(json.dumps({"grpc": f"127.0.0.1:{port}", "http": f"http://127.0.0.1:{http_port}"}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    if options.zmq:
        stepping.cancel()
        await virtual.close()
    await server.stop(0)


def main() -> None:
    """Serve until stdin ends."""
    from tokenizers import Tokenizer

    made = argparse.ArgumentParser(prog="python -m benchmarks.router.engine")
    made.add_argument("--step-ms", type=float, default=20.0)
    made.add_argument("--zmq", nargs=2, metavar=("INPUT", "OUTPUT"))
    made.add_argument("--vllm-version", default="0.33.0")
    made.add_argument("--tokenizer", default="models/demo/tokenizer.json")
    options = made.parse_args()
    options.tokenizer = Tokenizer.from_file(options.tokenizer)
    uvloop.run(_main(options))


if __name__ == "__main__":
    main()
