# SPDX-License-Identifier: Apache-2.0
"""A virtual engine core: vLLM's own protocol between its front ends and its engine core, spoken over the dispatcher.

A front end of vLLM's binds two sockets, and an engine core connects to both:

    input    ROUTER ◀──▶ DEALER    core: ready; then front: (type, msgpack frames...) with add, abort and utility calls
    output   PULL   ◀─── PUSH      core: msgpack frames of EngineCoreOutputs, one message a step

The source of frames and types is vLLM's v1/engine (`EngineCoreRequestType`, `UtilityOutput` and others);
they are encoded with vLLM's own codecs. Structs are arrays that grow at their end, so a front end of 0.33.0 works with
the structs of 0.32.0.

Crash path: a request that cannot be dispatched, and one that the dispatcher ends with an error, is an output with
FinishReason.ERROR; a utility call that makes no sense here is answered with a failure. Nothing ends the connection.

Decisions. ZeroMQ's file descriptor is watched by the event loop and read until it is empty (it only reports edges);
outputs that come in one turn of the loop share a message. Nothing here awaits.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

if TYPE_CHECKING:
    from router.faces.switch import Sink

zmq: Any = importlib.import_module("zmq")  # its own annotations do not have the constants
log = logging.getLogger(__name__)

IDENTITY = (0).to_bytes(2, "little")
"""The first engine's."""
READ_AT_ONCE = 64
"""Messages read in one turn of the loop."""
BLOCK_TOKENS, BLOCKS = 16, 1 << 20
"""What is said of a cache that lies elsewhere."""


class Dispatch(Protocol):
    """Who computes: the switch over the dispatcher."""

    def add(self, request: EngineCoreRequest, sink: Sink) -> None: ...
    def abort(self, request_ids: Iterable[str]) -> None: ...


class VirtualCore:
    """See the module's description. `start` and `close` frame its life, on one event loop."""

    def __init__(
        self,
        dispatch: Dispatch,
        input_address: str,
        output_address: str,
        *,
        max_model_len: int,
        vllm_version: str,
        max_num_seqs: int = 4096,
    ) -> None:
        """`vllm_version`: what the front end expects its engine to be."""
        self._dispatch = dispatch
        self._addresses = input_address, output_address
        self._ready = EngineCoreReadyResponse(
            max_model_len=max_model_len,
            num_gpu_blocks=BLOCKS,
            block_size=BLOCK_TOKENS,
            dp_stats_address=None,
            dtype="float32",
            vllm_version=vllm_version,
            world_size=1,
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_rank=0,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_model_len,
            instance_id="deltaserve",
            supports_lora=False,
            max_loras=0,
        )
        self._requests = MsgpackDecoder(EngineCoreRequest)
        self._anything = MsgpackDecoder()
        self._encoder = MsgpackEncoder()
        self._mine: set[str] = set()
        self._batch: list[EngineCoreOutput] = []
        self._context: Any = None
        self._input: Any = None
        self._output: Any = None

    @property
    def in_flight(self) -> int:
        """Requests of this front end."""
        return len(self._mine)

    def start(self) -> None:
        """Connect, say that the engine is ready, and serve. Needs a running event loop."""
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.DEALER)
        self._input.setsockopt(zmq.IDENTITY, IDENTITY)
        self._output = self._context.socket(zmq.PUSH)
        for socket, address in zip((self._input, self._output), self._addresses, strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)  # as many as there are requests, and those are bounded
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(address)
        self._input.send_multipart(self._encoder.encode(self._ready))
        loop = asyncio.get_running_loop()
        loop.add_reader(self._input.getsockopt(zmq.FD), self._read)
        loop.call_soon(self._read)

    async def close(self) -> None:
        """Abort what this front end has in flight, and disconnect. Never raises."""
        if self._context is None:
            return
        asyncio.get_running_loop().remove_reader(self._input.getsockopt(zmq.FD))
        self._dispatch.abort(list(self._mine))
        self._mine.clear()
        self._input.close()
        self._output.close()
        self._context.term()
        self._context = None

    # ---- a sink of the switch

    def take(self, output: EngineCoreOutput) -> None:
        """One output; it leaves with the others of this turn."""
        if output.finish_reason is not None:
            self._mine.discard(output.request_id)
        if not self._batch:
            asyncio.get_running_loop().call_soon(self._flush)
        self._batch.append(output)

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        self._send(EngineCoreOutputs(outputs=batch))

    def _send(self, outputs: EngineCoreOutputs) -> None:
        if self._context is not None:
            self._output.send_multipart(self._encoder.encode(outputs), zmq.NOBLOCK, copy=False)

    # ---- from the front end

    def _read(self) -> None:
        for _ in range(READ_AT_ONCE):
            if self._context is None:
                return
            try:
                kind, *frames = self._input.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._message(kind, frames)
            except Exception:  # one bad message is not the end of the others
                log.exception("a message of the front end could not be taken")
        asyncio.get_running_loop().call_soon(self._read)

    def _message(self, kind: bytes, frames: list[bytes]) -> None:
        if kind == EngineCoreRequestType.ADD.value:
            self._add(self._requests.decode(frames))
        elif kind == EngineCoreRequestType.ABORT.value:
            self._abort(self._anything.decode(frames))
        elif kind == EngineCoreRequestType.UTILITY.value:
            _, call, method, _ = self._anything.decode(frames)
            self._send(EngineCoreOutputs(utility_output=_utility(call, method)))

    def _add(self, request: EngineCoreRequest) -> None:
        self._mine.add(request.request_id)
        try:
            self._dispatch.add(request, self)
        except Exception as error:
            log.warning("request %s: %s", request.request_id, error)
            self.take(EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR))

    def _abort(self, request_ids: list[str]) -> None:
        self._mine.difference_update(request_ids)
        self._dispatch.abort(request_ids)


def _utility(call: int, method: str) -> UtilityOutput:
    if method == "get_supported_tasks":
        return UtilityOutput(call, result=UtilityResult(("generate",)))
    if method == "is_sleeping":
        return UtilityOutput(call, result=UtilityResult(False))
    return UtilityOutput(call, failure_message=f"{method}: the engine is a cluster and has no such call")
