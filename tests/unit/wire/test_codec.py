# SPDX-License-Identifier: Apache-2.0
"""Requests and steps survive the wire, in every field that a worker or vLLM's output processor reads."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from deltaserve.wire import codec
from deltaserve.wire import worker_pb2 as pb


def request(**changes: object) -> EngineCoreRequest:
    fields: dict[str, object] = {
        "request_id": "cmpl-1-0-abcdefgh",
        "prompt_token_ids": [1, 2, 163_839],
        "mm_features": None,
        "sampling_params": SamplingParams(max_tokens=5),
        "pooling_params": None,
        "arrival_time": 12.5,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }
    return EngineCoreRequest(**{**fields, **changes})


def over_the_wire(step: pb.Step) -> pb.Step:
    return pb.Step.FromString(step.SerializeToString())


def test_an_add_carries_everything_that_the_engine_reads() -> None:
    params = SamplingParams(
        n=1,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=7,
        presence_penalty=0.5,
        repetition_penalty=1.2,
        stop=["end", "."],
        stop_token_ids=[5, 6],
        logprobs=3,
        prompt_logprobs=2,
        min_tokens=2,
        max_tokens=9,
        logit_bias={17: -5.0},
        allowed_token_ids=[3, 4],
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=StructuredOutputsParams(json={"type": "object"}),
        extra_args={"note": [1, "two"]},
    )
    sent = request(sampling_params=params, priority=-3, cache_salt="salt")
    load = pb.Load(boundary="b", recompute=True)
    add = codec.encode_add(2**63, sent, codec.encode_sampling(params), load=load, timeout=1.5)
    add = pb.Add.FromString(add.SerializeToString())
    assert (add.id, add.timeout, add.load, add.WhichOneof("handoff")) == (2**63, 1.5, load, "load")
    got = codec.decode_add(add, "engine-name")
    assert got.request_id == "engine-name"
    assert got.external_req_id == sent.request_id
    assert got.prompt_token_ids == [1, 2, 163_839]
    assert (got.priority, got.cache_salt, got.arrival_time) == (-3, "salt", 12.5)
    assert got.sampling_params == params


def test_an_add_without_a_salt_has_none() -> None:
    sent = request()
    add = codec.encode_add(1, sent, codec.encode_sampling(sent.sampling_params))
    assert add.WhichOneof("handoff") is None
    assert codec.decode_add(add, "x").cache_salt is None


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**64 - 1),
            st.lists(st.integers(0, 2**32 - 1), max_size=5),
            st.sampled_from([None, *FinishReason]),
        ),
        max_size=8,
        unique_by=lambda row: row[0],
    )
)
def test_columns_round_trip(rows: list[tuple[int, list[int], FinishReason | None]]) -> None:
    outputs = [
        (leg, EngineCoreOutput("ignored", tokens, finish_reason=reason)) for leg, tokens, reason in rows
    ]
    step = over_the_wire(codec.encode_step(outputs))
    assert not step.rare
    got = codec.decode_step(step)
    assert [(leg, o.new_token_ids, o.finish_reason) for leg, o in got] == rows


def test_stop_is_present_although_it_is_zero() -> None:
    """Negative control: written as itself, STOP would read as "the request goes on"."""
    assert int(FinishReason.STOP) == 0
    step = over_the_wire(codec.encode_step([(1, EngineCoreOutput("", [4], finish_reason=FinishReason.STOP))]))
    assert list(step.finish) == [1]
    assert codec.decode_step(step)[0][1].finish_reason is FinishReason.STOP
    step.finish[0] = int(FinishReason.STOP)
    assert codec.decode_step(step)[0][1].finish_reason is None


def test_rare_fields_find_their_row() -> None:
    lists = LogprobsLists(
        np.array([[7, 8, 9]]), np.array([[-0.5, -1.0, -2.0]], dtype=np.float32), np.array([1])
    )
    big = torch.arange(3000, dtype=torch.float32).reshape(1000, 3)  # larger than what is sent inline
    prompt = LogprobsTensors(big.to(torch.int64), big, torch.zeros(1000, dtype=torch.int64))
    stats = PrefillStats(
        num_prompt_tokens=9, num_computed_tokens=3, num_cached_tokens=6, num_local_cached_tokens=6
    )
    outputs = [
        (10, EngineCoreOutput("a", [1])),
        (
            11,
            EngineCoreOutput(
                "b", [7], new_logprobs=lists, new_prompt_logprobs_tensors=prompt, prefill_stats=stats
            ),
        ),
        (12, EngineCoreOutput("c", [2, 3], finish_reason=FinishReason.STOP, stop_reason=5)),
        (13, EngineCoreOutput("d", [4], finish_reason=FinishReason.STOP, stop_reason="end")),
    ]
    step = over_the_wire(codec.encode_step(outputs))
    assert len(step.rare) > 1
    got = dict(codec.decode_step(step))
    assert list(got) == [10, 11, 12, 13]
    assert got[10].new_logprobs is None
    assert got[10].prefill_stats is None
    second = got[11]
    assert (second.new_token_ids, second.finish_reason, second.prefill_stats) == ([7], None, stats)
    assert np.array_equal(second.new_logprobs.logprobs, lists.logprobs)
    assert np.array_equal(second.new_logprobs.logprob_token_ids, lists.logprob_token_ids)
    assert torch.equal(second.new_prompt_logprobs_tensors.logprobs, big)
    assert (got[12].new_token_ids, got[12].finish_reason, got[12].stop_reason) == (
        [2, 3],
        FinishReason.STOP,
        5,
    )
    assert got[13].stop_reason == "end"


def test_an_error_ends_the_request_without_a_token() -> None:
    ((leg, output),) = codec.decode_step(over_the_wire(codec.encode_error(5)))
    assert (leg, output.new_token_ids, output.finish_reason) == (5, [], FinishReason.ERROR)


@pytest.mark.parametrize(
    "step",
    [
        pb.Step(ids=[1, 2], counts=[1], tokens=[5], finish=[0, 0]),
        pb.Step(ids=[1], counts=[2], tokens=[5], finish=[0]),
        pb.Step(ids=[1], counts=[1], tokens=[5], finish=[]),
        pb.Step(ids=[1], counts=[1], tokens=[5], finish=[99]),
    ],
)
def test_columns_that_do_not_fit_are_refused(step: pb.Step) -> None:
    with pytest.raises(ValueError, match="step"):
        codec.decode_step(step)


def test_parameters_with_arrays_are_refused() -> None:
    params = SamplingParams(extra_args={"mask": np.zeros(10_000)})
    with pytest.raises(TypeError, match="array"):
        codec.encode_sampling(params)


@pytest.mark.parametrize("ended", [None, False, True])
@pytest.mark.parametrize("kwargs", [None, {"chat_template_kwargs": {"thinking": False}}])
def test_where_reasoning_ends_is_kept(ended: bool | None, kwargs: dict[str, object] | None) -> None:
    sent = request()
    sent.reasoning_ended, sent.reasoning_parser_kwargs = ended, kwargs
    add = pb.Add.FromString(codec.encode_add(3, sent, b"").SerializeToString())
    add.sampling = codec.encode_sampling(SamplingParams())
    found = codec.decode_add(add, "r")
    assert (found.reasoning_ended, found.reasoning_parser_kwargs) == (ended, kwargs)


def _aborts(*legs: int, size: int = 1) -> deque[pb.ToWorker]:
    return deque(pb.ToWorker(abort=pb.Abort(ids=[leg] * size)) for leg in legs)


def test_what_is_ready_together_is_one_message_and_keeps_its_order() -> None:
    queue = _aborts(*range(1, codec.BUNDLE_MESSAGES + 2))
    sent = pb.ToWorker.FromString(codec.bundled(queue).SerializeToString())
    found = [message.abort.ids[0] for message in codec.unbundled(sent)]
    assert found == list(range(1, codec.BUNDLE_MESSAGES + 1))
    assert [message.abort.ids[0] for message in queue] == [codec.BUNDLE_MESSAGES + 1], "a bundle is bounded"


def test_a_message_by_itself_is_no_bundle() -> None:
    queue = _aborts(7)
    message = codec.bundled(queue)
    assert message.WhichOneof("body") == "abort"
    assert not queue
    assert codec.unbundled(message) == (message,)


def test_a_bundle_ends_with_the_message_that_fills_it() -> None:
    queue = _aborts(1, 2, 3, size=codec.BUNDLE_BYTES)
    assert codec.bundled(queue).WhichOneof("body") == "abort"
    assert len(queue) == 2
    queue = _aborts(1, 2, 3, size=codec.BUNDLE_BYTES * 2 // 3)
    assert len(codec.unbundled(codec.bundled(queue))) == 2
