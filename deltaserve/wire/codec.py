# SPDX-License-Identifier: Apache-2.0
"""Between vLLM's engine-core types and the messages of worker.proto. Router and workers both use this file.

    router                                     worker
    EngineCoreRequest ── encode_add ──▶ Add ── decode_add ──▶ EngineCoreRequest
    (leg id, EngineCoreOutput) ◀── decode_step ── Step ◀── encode_step ── (leg id, EngineCoreOutput)

A step travels in columns. A token and a finish reason are all that nearly every output holds, so those have columns of
their own; what else an output may carry (log-probs, prompt log-probs, a stop reason, the prefill statistics of a first
output) goes into the `rare` frames:

    rare[0]       msgpack of [(row, EngineCoreOutput), ...]; token ids, request id and finish reason are left out there
    rare[1 ..]    the buffers of its arrays, as vLLM's MsgpackEncoder hands them out

Finish reasons are shifted by one (0: the request goes on), because vLLM's STOP is 0 and a column knows no absence.
Engine events are dropped: they carry one machine's monotonic clock.

vLLM's structs are arrays in msgpack and grow at their end, so 0.32.0 and 0.33.0 read each other's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from deltaserve.wire import worker_pb2 as pb

MESSAGE_BYTES = 256 << 20
"""Largest message either side accepts; log-probs of a long prompt make the large ones."""

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
"""For the router's channels: a worker that stops answering is noticed within 10 s, whatever TCP believes."""

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.so_reuseport", 0),
]
"""For a worker's server: allows the pings above, which gRPC's defaults punish by closing the connection."""

BUNDLE_MESSAGES, BUNDLE_BYTES = 64, 1 << 20
"""A bundle has at most so many messages, and not another one once it has so many bytes."""

_FINISHED = {reason: 1 + int(reason) for reason in FinishReason}
_REASON: list[FinishReason | None] = [None, *FinishReason]

_encoder = MsgpackEncoder()
_sampling_decoder = MsgpackDecoder(SamplingParams)
_rare_decoder = MsgpackDecoder(list[tuple[int, EngineCoreOutput]])


def encode_sampling(params: SamplingParams) -> bytes:
    """`Add.sampling` of sampling parameters. Raises TypeError when they hold something msgpack cannot carry."""
    frames = _encoder.encode(params)
    if len(frames) != 1:
        raise TypeError("sampling parameters with array arguments cannot be sent to a worker")
    return bytes(frames[0])


def decode_sampling(data: bytes) -> SamplingParams:
    """Inverse of `encode_sampling`. Raises msgspec.DecodeError when it is not that."""
    return _sampling_decoder.decode(data)


def encode_add(
    leg: int,
    request: EngineCoreRequest,
    sampling: bytes,
    *,
    publish: pb.Publish | None = None,
    load: pb.Load | None = None,
    timeout: float = 0.0,
    history: Sequence[int] = (),
    traceparent: str = "",
    work: int = 0,
) -> pb.Add:
    """The `Add` of one leg of a request (at most one of `publish` and `load`); `sampling` from `encode_sampling`.

    `history`: tokens of the answer that exist already, for a request that is resumed. `traceparent`: of the span that
    the worker's spans belong below. `work`: tokens that it counts as. The request goes by the name that the client
    knows it by.
    """
    return pb.Add(
        id=leg,
        request_id=request.external_req_id or request.request_id,
        prompt=request.prompt_token_ids,
        sampling=sampling,
        priority=request.priority,
        cache_salt=request.cache_salt or "",
        arrival=request.arrival_time,
        publish=publish,
        load=load,
        timeout=timeout,
        history=history,
        reasoning_ended=request.reasoning_ended,
        reasoning=msgspec.msgpack.encode(request.reasoning_parser_kwargs)
        if request.reasoning_parser_kwargs
        else b"",
        traceparent=traceparent,
        work=work,
    )


def decode_add(add: pb.Add, request_id: str) -> EngineCoreRequest:
    """The engine-core request of `add`, named `request_id` in the worker's engine."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(add.prompt),
        mm_features=None,
        sampling_params=decode_sampling(add.sampling),
        pooling_params=None,
        arrival_time=add.arrival,
        lora_request=None,
        cache_salt=add.cache_salt or None,
        data_parallel_rank=None,
        priority=add.priority,
        external_req_id=add.request_id,
        reasoning_ended=add.reasoning_ended if add.HasField("reasoning_ended") else None,
        reasoning_parser_kwargs=msgspec.msgpack.decode(add.reasoning) if add.reasoning else None,
    )


def bundled(queue: deque[pb.ToWorker]) -> pb.ToWorker:
    """Take from the queue, which is not empty, what one message carries: its head, or a bundle that begins with it."""
    first = queue.popleft()
    if not queue:
        return first
    messages, size = [first], first.ByteSize()
    while queue and len(messages) < BUNDLE_MESSAGES and size < BUNDLE_BYTES:
        messages.append(queue.popleft())
        size += messages[-1].ByteSize()
    return pb.ToWorker(bundle=pb.Bundle(messages=messages)) if len(messages) > 1 else first


def unbundled(message: pb.ToWorker) -> Sequence[pb.ToWorker]:
    """The messages of a bundle; of another message, that one."""
    return message.bundle.messages if message.WhichOneof("body") == "bundle" else (message,)


def _rare(output: EngineCoreOutput) -> EngineCoreOutput | None:
    """What of `output` has no column, or None when that is nothing."""
    if not (
        output.new_logprobs is not None
        or output.prefill_stats is not None
        or output.stop_reason is not None
        or output.new_prompt_logprobs_tensors is not None
        or output.prompt_token_id_logprobs is not None
        or output.num_nans_in_logits
        or output.routed_experts is not None
        or output.new_sampling_mask is not None
        or output.spec_decode_metrics is not None
    ):
        return None
    return EngineCoreOutput(
        request_id="",
        new_token_ids=[],
        new_logprobs=output.new_logprobs,
        new_prompt_logprobs_tensors=output.new_prompt_logprobs_tensors,
        stop_reason=output.stop_reason,
        prefill_stats=output.prefill_stats,
        routed_experts=output.routed_experts,
        num_nans_in_logits=output.num_nans_in_logits,
        new_sampling_mask=output.new_sampling_mask,
        spec_decode_metrics=output.spec_decode_metrics,
        prompt_token_id_logprobs=output.prompt_token_id_logprobs,
    )


def encode_step(outputs: Iterable[tuple[int, EngineCoreOutput]]) -> pb.Step:
    """One engine step for one router: (leg id, output) for each of its requests that moved."""
    ids: list[int] = []
    counts: list[int] = []
    tokens: list[int] = []
    finish: list[int] = []
    rare: list[tuple[int, EngineCoreOutput]] = []
    for leg, output in outputs:
        new = output.new_token_ids
        ids.append(leg)
        counts.append(len(new))
        tokens.extend(new)
        reason = output.finish_reason
        finish.append(0 if reason is None else _FINISHED[reason])
        extra = _rare(output)
        if extra is not None:
            rare.append((len(ids) - 1, extra))
    frames: Sequence[bytes] = [bytes(frame) for frame in _encoder.encode(rare)] if rare else ()
    return pb.Step(ids=ids, counts=counts, tokens=tokens, finish=finish, rare=frames)


def encode_error(leg: int) -> pb.Step:
    """A step that ends one request with FinishReason.ERROR and no token."""
    return pb.Step(ids=[leg], counts=[0], finish=[_FINISHED[FinishReason.ERROR]])


def decode_step(step: pb.Step) -> list[tuple[int, EngineCoreOutput]]:
    """Inverse of `encode_step`; the outputs' request_id is left empty, for the router to fill in.

    Raises ValueError when the columns do not fit each other, or a finish reason is none that this version knows.
    """
    ids, counts, finish = step.ids, step.counts, step.finish
    tokens = list(step.tokens)
    rows = len(ids)
    if len(counts) != rows or len(finish) != rows or sum(counts) != len(tokens):
        raise ValueError(
            f"step columns differ: {rows} ids, {len(counts)} counts, {len(finish)} finish, {len(tokens)} tokens"
        )
    if rows and max(finish) >= len(_REASON):
        raise ValueError(f"step has finish reason {max(finish)}; the largest known is {len(_REASON) - 1}")
    result: list[tuple[int, EngineCoreOutput]] = []
    start = 0
    for leg, count, code in zip(ids, counts, finish, strict=True):
        end = start + count
        result.append((leg, EngineCoreOutput("", tokens[start:end], finish_reason=_REASON[code])))
        start = end
    if step.rare:
        # Arrays are read in place, and torch wants memory that it may write.
        frames = [step.rare[0], *(bytearray(frame) for frame in step.rare[1:])]
        for row, extra in _rare_decoder.decode(frames):
            leg, plain = result[row]
            extra.new_token_ids = plain.new_token_ids
            extra.finish_reason = plain.finish_reason
            result[row] = (leg, extra)
    return result
