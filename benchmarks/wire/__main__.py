# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.wire`; see the package's description."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop
from vllm.v1.engine import EngineCoreOutput

from deltaserve.wire import codec
from deltaserve.wire import worker_pb2 as pb
from deltaserve.wire.worker_pb2_grpc import WorkerServicer, WorkerStub, add_WorkerServicer_to_server

STREAMS, AIM = 256, 0.25
SHAPES = {"a message a step": STREAMS, "a message a token": 1, "empty messages": 0}
"""Requests in a message."""


@dataclass
class Row:
    """One shape of messages."""

    name: str
    tokens: int
    messages: int
    reading: float
    """CPU seconds of the router's end: all of it for empty messages, else for 100,000 tokens."""
    writing: float
    """The same of the worker's end."""


def cpu() -> float:
    """Seconds that this process has computed, in all of its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Worker(WorkerServicer):
    """Makes messages as fast as they are read; the prompt of an `Add` says how many, and of how many requests."""

    def __init__(self) -> None:
        self.taken = 0.0

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.WorkerDescription:
        return pb.WorkerDescription(worker_id=f"{self.taken:.6f}")

    async def Engine(
        self, requests: AsyncIterator[pb.ToWorker], context: Any
    ) -> AsyncIterator[pb.FromWorker]:
        async for message in requests:
            number, rows = message.add.prompt
            began = cpu()
            for step in range(number):
                outputs = [(leg, EngineCoreOutput("", [step + leg])) for leg in range(1, rows + 1)]
                yield pb.FromWorker(step=codec.encode_step(outputs))
                await asyncio.sleep(0)
            self.taken = cpu() - began


async def serve() -> None:
    """The worker's end, until stdin ends."""
    server = grpc.aio.server(options=codec.SERVER_OPTIONS)
    add_WorkerServicer_to_server(Worker(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


async def read(port: int, tokens: int) -> list[Row]:
    """The router's end."""
    rows = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=codec.CHANNEL_OPTIONS) as channel:
        stub = WorkerStub(channel)
        for name, size in SHAPES.items():
            messages = tokens // (size or STREAMS)
            call = stub.Engine()
            began, found = cpu(), 0
            await call.write(pb.ToWorker(add=pb.Add(prompt=(messages, size))))
            await call.done_writing()
            async for message in call:
                found += sum(len(output.new_token_ids) for _, output in codec.decode_step(message.step))
            reading = cpu() - began
            if found != messages * size:
                raise RuntimeError(f"{name}: {found} tokens came of {messages * size}")
            writing = float((await stub.Describe(pb.DescribeRequest())).worker_id)
            per = 1e5 / found if found else 1.0
            rows.append(Row(name, found, messages, reading * per, writing * per))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 when the aim is missed."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.wire", description=__doc__)
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    made.add_argument("--tokens", type=int, default=200 * STREAMS * 4, help="of each shape (default: 204800)")
    made.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = made.parse_args(arguments)
    if options.tokens < STREAMS:
        made.error(f"--tokens: must be at least {STREAMS}, one step")
    if options.serve:
        uvloop.run(serve())
        return 0
    command = [sys.executable, "-m", "benchmarks.wire", "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdin is not None
        rows = uvloop.run(read(int(worker.stdout.readline()), options.tokens))
        worker.stdin.close()
    print(f"{'CPU s for 100,000 tokens':<26} {'router':>7} {'worker':>7} {'messages':>9}")
    for row in rows:
        print(f"{row.name:<26} {row.reading:>7.3f} {row.writing:>7.3f} {row.messages:>9}")
    print(f"(empty messages: in all) load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return int(max(rows[0].reading, rows[0].writing) > AIM)


if __name__ == "__main__":
    sys.exit(main())
