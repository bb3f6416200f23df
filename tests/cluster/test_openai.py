# SPDX-License-Identifier: Apache-2.0
"""The endpoint of a real cluster as clients use it: the openai package, and every error with its status."""

from __future__ import annotations

import json

import openai
import pytest

from deltaserve.up import Cluster
from tests.cluster.calls import call, metric, trace
from tests.support.processes import wait_until

pytestmark = pytest.mark.cluster
QUESTION = "<kv> for = use ; with = 3 ; for ?"


@pytest.fixture
def client(cluster: Cluster) -> openai.OpenAI:
    """The openai client of the shared cluster."""
    return openai.OpenAI(base_url=cluster.endpoint + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.mark.parametrize("placement", ["handover", "local"])
def test_completion_streamed_and_whole_are_the_same(
    client: openai.OpenAI, cluster: Cluster, placement: str
) -> None:
    fields = {
        "model": cluster.served_model_name,
        "prompt": QUESTION,
        "max_tokens": 12,
        "temperature": 0,
        "extra_body": {"kv_transfer_params": {"placement": placement}, "ignore_eos": True},
    }
    whole = client.completions.create(**fields)
    streamed = list(client.completions.create(**fields, stream=True))
    assert whole.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == whole.choices[0].text
    assert len(streamed) > 2, "tokens come as they are made"
    assert streamed[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert trace(cluster, whole.id)["route"].split()[0] == placement
    assert whole.usage is not None
    assert trace(cluster, whole.id)["prompt_tokens"] == whole.usage.prompt_tokens


def test_the_model_recalls_out_of_its_state(client: openai.OpenAI, cluster: Cluster) -> None:
    for value in ("use", "9"):
        answer = client.completions.create(
            model=cluster.served_model_name,
            prompt=f"<kv> for = {value} ; with = 3 ; for ?",
            max_tokens=1,
            temperature=0,
            extra_body={"kv_transfer_params": {"placement": "handover"}},
        )
        assert answer.choices[0].text.strip() == value
        assert trace(cluster, answer.id)["from_store"] > 0


def test_chat_streamed_and_whole_are_the_same(client: openai.OpenAI, cluster: Cluster) -> None:
    fields = {
        "model": cluster.served_model_name,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 12,
        "temperature": 0,
        "extra_body": {"kv_transfer_params": {"placement": "handover"}},
    }
    whole = client.chat.completions.create(**fields)
    streamed = list(
        client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].message.role == "assistant"
    assert streamed[-1].usage is not None
    assert whole.usage is not None
    assert streamed[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert trace(cluster, whole.id)["from_store"] == whole.usage.prompt_tokens - 1


def test_several_answers_and_several_prompts(client: openai.OpenAI, cluster: Cluster) -> None:
    answer = client.completions.create(
        model=cluster.served_model_name,
        prompt=[QUESTION, "<kv> for = 5 ; for ?"],
        n=2,
        max_tokens=3,
        extra_body={"kv_transfer_params": {"placement": "handover"}, "top_k": 1},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text != answer.choices[2].text


def test_models_tokenize_detokenize(client: openai.OpenAI, cluster: Cluster) -> None:
    assert [model.id for model in client.models.list()] == [cluster.served_model_name]
    status, tokens = call(
        cluster.endpoint + "/tokenize", {"model": cluster.served_model_name, "prompt": QUESTION}
    )
    assert status == 200
    assert tokens["count"] == len(tokens["tokens"]) > 8
    status, text = call(
        cluster.endpoint + "/detokenize",
        {"model": cluster.served_model_name, "tokens": tokens["tokens"]},
    )
    assert status == 200
    assert "for" in text["prompt"]


def test_health_names_every_role(cluster: Cluster) -> None:
    status, health = call(cluster.endpoint + "/health")
    assert (status, health["status"], health["missing"]) == (200, "ok", [])
    assert {role: state["ready"] for role, state in health["roles"].items()} == {"prefill": 1, "decode": 1}


def test_metrics_count_requests(client: openai.OpenAI, cluster: Cluster) -> None:
    names = ["deltaserve_router_handovers_total", 'deltaserve_router_local_prefill_total{reason="policy"}']
    for placement, moved in (("handover", [1, 0]), ("local", [0, 1])):
        before = [metric(cluster, name) for name in names]
        client.completions.create(
            model=cluster.served_model_name,
            prompt=QUESTION,
            max_tokens=2,
            extra_body={"kv_transfer_params": {"placement": placement}},
        )
        assert [metric(cluster, name) - old for name, old in zip(names, before, strict=True)] == moved
    _, text = call(cluster.endpoint + "/metrics")
    assert "vllm:" in text["text"], "vLLM's own metrics are there too"


def test_seeded_sampling_repeats_and_another_seed_differs(client: openai.OpenAI, cluster: Cluster) -> None:
    def sample(seed: int, placement: str) -> str:
        answer = client.completions.create(
            model=cluster.served_model_name,
            prompt="<text> The",
            max_tokens=24,
            temperature=1.5,
            seed=seed,
            extra_body={"kv_transfer_params": {"placement": placement}, "ignore_eos": True},
        )
        return answer.choices[0].text

    assert sample(1, "handover") == sample(1, "handover") == sample(1, "local")
    assert len({sample(seed, "handover") for seed in range(1, 5)}) > 1


@pytest.mark.parametrize(
    ("path", "body", "raw", "status", "words"),
    [
        ("/v1/completions", None, b"{not json", 400, ""),
        ("/v1/completions", {"model": "MODEL"}, None, 400, "prompt"),
        ("/v1/completions", {"model": "other", "prompt": "a"}, None, 404, "other"),
        (
            "/v1/chat/completions",
            {"model": "other", "messages": [{"role": "user", "content": "a"}]},
            None,
            404,
            "other",
        ),
        ("/v1/nothing", {}, None, 404, "/v1/nothing"),
        ("/v1/models", {}, None, 405, "GET"),
        ("/v1/completions", {"model": "MODEL", "prompt": [7] * 17000}, None, 400, "16384"),
        ("/v1/completions", {"model": "MODEL", "prompt": "a", "max_tokens": -1}, None, 400, "max_tokens"),
        (
            "/v1/completions",
            {"model": "MODEL", "prompt": "a", "kv_transfer_params": {"placement": "moon"}},
            None,
            400,
            "placement",
        ),
        (
            "/v1/completions",
            {"model": "MODEL", "prompt": "a", "kv_transfer_params": {"boundary": "x"}},
            None,
            400,
            "only the key 'placement'",
        ),
        ("/v1/completions", None, b" " * ((8 << 20) + 1), 413, "max-body-bytes"),
    ],
)
def test_errors_have_their_status_and_say_what_is_wrong(
    cluster: Cluster, path: str, body: object, raw: bytes | None, status: int, words: str
) -> None:
    if isinstance(body, dict) and body.get("model") == "MODEL":
        body = {**body, "model": cluster.served_model_name}
    found, document = call(cluster.endpoint + path, body, raw)
    assert found == status, document
    assert document["error"]["message"], document
    assert words in json.dumps(document)
    # The cluster is as well as before.
    assert call(cluster.endpoint + "/health")[1]["status"] == "ok"


def test_openai_errors_are_raised_as_their_classes(client: openai.OpenAI, cluster: Cluster) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="16384"):
        client.completions.create(model=cluster.served_model_name, prompt=[7] * 17000)


def test_a_client_that_goes_away_leaves_nothing(client: openai.OpenAI, cluster: Cluster) -> None:
    with client.completions.create(
        model=cluster.served_model_name,
        prompt="<text> The",
        max_tokens=2000,
        stream=True,
        extra_body={"ignore_eos": True, "kv_transfer_params": {"placement": "handover"}},
    ) as stream:
        for _ in range(3):
            next(iter(stream))

    wait_until(lambda: call(cluster.endpoint + "/health")[1]["in_flight"] == 0, 30, "the request has ended")
