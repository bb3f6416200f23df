# SPDX-License-Identifier: Apache-2.0
"""The requests of test_api_parity.py: what clients send to an OpenAI endpoint, by the field that is looked at.

Each goes to one vLLM server and to the cluster, in this order and one at a time. The demonstration model was not
trained to think or to call tools, so texts with such marks are forced by a grammar or copied out of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MODEL = "demo"
TOOL_PARSER = REASONING_PARSER = "kimi_k2"
LONG = "<kv> " + " ; ".join(f"for = {i}" for i in range(60)) + " ; with = 3 ; for ?"
RECALL = "<kv> for = use ; with = 3 ; for ?"
TEXT = "<text> The"
COPY = "<copy> this is a passage <to>"
THINK = "<copy> <think> a passage </think> value <to>"
CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_port:0<|tool_call_argument_begin|>"
    '{"key": "use", "n": 3}<|tool_call_end|><|tool_calls_section_end|>'
)
PARAMETERS = {
    "type": "object",
    "properties": {"key": {"enum": ["use", "for"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["key", "n"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "a port", "parameters": PARAMETERS}}
    for name in ("get_port", "get_host")
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "port", "schema": PARAMETERS, "strict": True}}
PLAIN = {"chat_template_kwargs": {"thinking": False}}
"""The answer is no reasoning, so a grammar begins with its first token."""


@dataclass(frozen=True)
class Request:
    """One request; `name` is unique and begins with the endpoint's."""

    name: str
    path: str
    body: dict[str, Any] | None = None
    """None: a GET."""
    raw: bytes | None = None
    """Sent instead of `body`."""
    headers: dict[str, str] = field(default_factory=dict)
    placements: tuple[str, ...] = ("handover",)
    """How the cluster serves it, each in turn."""
    status_only: bool = False
    """True: only the status is compared; docs/api.md says why."""

    @property
    def streamed(self) -> bool:
        """Whether the answer is a stream of events."""
        return bool((self.body or {}).get("stream"))


BOTH = ("handover", "local")


def completion(name: str, placements: tuple[str, ...] = ("handover",), **fields: Any) -> Request:
    """Greedy unless `fields` say otherwise."""
    body = {"model": MODEL, "prompt": RECALL, "max_tokens": 8, "temperature": 0, **fields}
    return Request(f"completions: {name}", "/v1/completions", body, placements=placements)


def chat(
    name: str, content: str = RECALL, placements: tuple[str, ...] = ("handover",), **fields: Any
) -> Request:
    """Greedy unless `fields` say otherwise."""
    messages = [{"role": "user", "content": content}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0, **fields}
    return Request(f"chat: {name}", "/v1/chat/completions", body, placements=placements)


def response(name: str, **fields: Any) -> Request:
    """One of /v1/responses."""
    body = {"model": MODEL, "input": RECALL, "max_output_tokens": 12, "temperature": 0, **fields}
    return Request(f"responses: {name}", "/v1/responses", body)


def message(name: str, path: str = "/v1/messages", **fields: Any) -> Request:
    """One of Anthropic's API."""
    messages = [{"role": "user", "content": RECALL}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0, **fields}
    return Request(f"messages: {name}", path, body)


def post(name: str, path: str, **body: Any) -> Request:
    """Any other POST."""
    return Request(f"{path.removeprefix('/')}: {name}", path, body)


def requests() -> list[Request]:
    """All of them, in the order in which they are sent."""
    return [
        *_completions(),
        *_sampled(),
        *_structured(),
        *_chats(),
        *_tools(),
        *_responses_and_messages(),
        *_plain(),
        *_errors(),
    ]


def _completions() -> Iterator[Request]:
    usage = {"include_usage": True}
    yield completion("plain", BOTH)
    yield completion("streamed", BOTH, stream=True)
    yield completion("streamed with usage", stream=True, stream_options=usage)
    yield completion(
        "streamed with usage all along",
        stream=True,
        stream_options={**usage, "continuous_usage_stats": True},
    )
    yield completion("long prompt", BOTH, prompt=LONG)
    yield completion("long prompt again: cached", BOTH, prompt=LONG)
    yield completion("longer prompt with the same beginning: cached", prompt=LONG + " 5 ; with ?")
    yield completion("prompt of token ids", prompt=[1, 6, 300, 301, 302, 303, 304])
    yield completion("prompt of one token", prompt=[6])
    yield completion("prompt of one block", prompt=list(range(300, 316)))
    yield completion("prompt of one block and a token", prompt=list(range(300, 317)))
    yield completion("list of prompts", prompt=[RECALL, TEXT, "<kv> for = 5 ; for ?"])
    yield completion("list of prompts of token ids", prompt=[[6, 300, 301], [6, 302, 303, 304]])
    yield completion("max_tokens 1", max_tokens=1)
    yield completion("max_tokens 1, streamed", max_tokens=1, stream=True, stream_options=usage)
    yield completion("max_tokens left out", max_tokens=None)
    yield completion("ignore_eos", ignore_eos=True, max_tokens=20)
    yield completion("return_token_ids", return_token_ids=True)
    yield completion("return_token_ids, streamed", return_token_ids=True, stream=True)
    yield completion("logprobs 0", BOTH, logprobs=0)
    yield completion("logprobs 1", logprobs=1, max_tokens=2)
    yield completion("logprobs 5", BOTH, logprobs=5)
    yield completion("logprobs 3, streamed", logprobs=3, stream=True)
    yield completion("logprobs as token ids", logprobs=2, return_tokens_as_token_ids=True)
    yield completion("logprob_token_ids", logprobs=1, logprob_token_ids=[20, 300, 301])
    yield completion("prompt_logprobs", BOTH, prompt_logprobs=3)
    yield completion("prompt_logprobs of a long prompt", prompt=LONG, prompt_logprobs=0, max_tokens=1)
    yield completion(
        "prompt_logprobs without an answer", prompt_logprobs=1, logprobs=1, echo=True, max_tokens=0
    )
    yield completion("echo", echo=True)
    yield completion("echo, streamed", echo=True, stream=True, stream_options=usage)
    yield completion("echo with logprobs", BOTH, echo=True, logprobs=2)
    yield completion("stop string", prompt=TEXT, max_tokens=20, stop=["logical", "is"])
    yield completion("stop string, streamed", prompt=TEXT, max_tokens=20, stop=["logical", "is"], stream=True)
    yield completion(
        "stop string kept", prompt=TEXT, max_tokens=20, stop=["al n"], include_stop_str_in_output=True
    )
    yield completion("stop string on the first token", BOTH, stop=[" use", "use"])
    yield completion(
        "stop string on the first token, streamed", stop=["use"], stream=True, stream_options=usage
    )
    yield completion("stop token ids", prompt=TEXT, max_tokens=20, stop_token_ids=list(range(11, 90)))
    yield completion("any token stops: on the first", BOTH, stop_token_ids=list(range(3, 1152)))
    yield completion("min_tokens holds a stop token back", prompt=COPY, max_tokens=20, min_tokens=15)
    yield completion(
        "min_tokens holds a stop string back", prompt=TEXT, max_tokens=20, min_tokens=10, stop=["a"]
    )
    yield completion("logit_bias for a token", BOTH, logit_bias={"300": 100})
    yield completion("logit_bias against a token", logit_bias={str(token): -100 for token in range(250, 500)})
    yield completion("allowed_token_ids", allowed_token_ids=[300, 301, 302], return_token_ids=True)
    yield completion("bad_words", prompt=TEXT, bad_words=["program", "during"])
    yield completion("penalties", prompt=TEXT, max_tokens=24, presence_penalty=1.5, frequency_penalty=0.5)
    yield completion("repetition_penalty", BOTH, prompt=COPY, max_tokens=16, repetition_penalty=1.8)
    yield completion("special tokens shown", prompt=COPY, max_tokens=16, skip_special_tokens=False)
    yield completion("prompt cut to its end", prompt=LONG, truncate_prompt_tokens=20)
    yield completion("without the first special token", add_special_tokens=False)
    yield completion("priority", priority=3)
    yield completion("user and request id", user="somebody", request_id="my-request")


def _sampled() -> Iterator[Request]:
    sampled = {"prompt": TEXT, "temperature": 1.3, "max_tokens": 12, "ignore_eos": True}
    for seed in (1, 2, 3):
        yield completion(f"seed {seed}", BOTH, **sampled, seed=seed)
    yield completion("seeded, streamed", **sampled, seed=4, stream=True)
    yield completion("seeded, top_k", **sampled, seed=5, top_k=20)
    yield completion("seeded, top_p", **sampled, seed=6, top_p=0.7)
    yield completion("seeded, min_p and logprobs", **sampled, seed=7, min_p=0.02, logprobs=2)
    yield completion("n 3, seeded", BOTH, **sampled, seed=8, n=3)
    yield completion("n 2 of two prompts, seeded", **{**sampled, "prompt": [TEXT, RECALL]}, seed=9, n=2)
    yield completion("n 2, seeded, streamed", **sampled, seed=10, n=2, stream=True)


def _structured() -> Iterator[Request]:
    yield completion("choice", BOTH, structured_outputs={"choice": ["prefill", "decode"]})
    yield completion("regex", structured_outputs={"regex": "[a-c]{3,5}x"}, max_tokens=12)
    yield completion("grammar", structured_outputs={"grammar": 'root ::= "a" | "b" root'}, max_tokens=12)
    yield completion("json schema", BOTH, structured_outputs={"json": PARAMETERS}, max_tokens=40)
    yield completion("response_format", response_format=FORMAT, max_tokens=40, seed=3, temperature=1)


def _chats() -> Iterator[Request]:
    usage = {"include_usage": True}
    yield chat("reasoning", placements=BOTH)
    yield chat("reasoning, streamed", stream=True, stream_options=usage)
    yield chat("reasoning that ends", THINK, max_tokens=32)
    yield chat("reasoning that ends, streamed", THINK, max_tokens=32, stream=True)
    yield chat("reasoning left out", include_reasoning=False)
    yield chat("content", placements=BOTH, **PLAIN)
    yield chat("content, streamed", placements=BOTH, stream=True, stream_options=usage, **PLAIN)
    yield chat("logprobs", logprobs=True, top_logprobs=3, placements=BOTH, **PLAIN)
    yield chat("logprobs, streamed", logprobs=True, top_logprobs=1, stream=True, **PLAIN)
    yield chat("prompt_logprobs", prompt_logprobs=2, max_tokens=2, **PLAIN)
    yield chat("n 2, seeded", n=2, seed=1, temperature=1.2, **PLAIN)
    yield chat("n 2, seeded, streamed", n=2, seed=1, temperature=1.2, stream=True, **PLAIN)
    yield chat("stop", stop=["endpoint"], max_tokens=30, **PLAIN)
    yield chat("json_schema", response_format=FORMAT, max_tokens=40, placements=BOTH, **PLAIN)
    yield chat("json_schema, streamed", response_format=FORMAT, max_tokens=40, stream=True, **PLAIN)
    yield chat("json_schema after reasoning", THINK, response_format=FORMAT, max_tokens=64, placements=BOTH)
    yield chat("json_object", response_format={"type": "json_object"}, max_tokens=24, **PLAIN)
    yield chat("max_completion_tokens", max_tokens=None, max_completion_tokens=5, **PLAIN)
    yield chat("echo and token ids", echo=True, return_token_ids=True, **PLAIN)
    history = [
        {"role": "system", "content": "You answer."},
        {"role": "user", "content": "for = use"},
        {"role": "assistant", "content": "noted"},
        {"role": "user", "content": [{"type": "text", "text": "for ?"}]},
    ]
    yield chat("a conversation", messages=history, **PLAIN)


def _tools() -> Iterator[Request]:
    forced = {"type": "function", "function": {"name": "get_host"}}
    for stream in (False, True):
        suffix = ", streamed" if stream else ""
        yield chat(
            f"tool named{suffix}", tools=TOOLS, tool_choice=forced, max_tokens=48, stream=stream, **PLAIN
        )
        yield chat(
            f"tool required{suffix}",
            tools=TOOLS,
            tool_choice="required",
            max_tokens=96,
            stream=stream,
            **PLAIN,
        )
        yield chat(
            f"tool call written by the model{suffix}",
            tools=TOOLS,
            tool_choice="auto",
            max_tokens=160,
            stream=stream,
            structured_outputs={"choice": [CALL]},
            **PLAIN,
        )
    yield chat("tools, none called", tools=TOOLS, **PLAIN)
    yield chat("tools, none wanted", tools=TOOLS, tool_choice="none", **PLAIN)
    yield chat(
        "tool required, handed over", LONG, tools=TOOLS, tool_choice="required", max_tokens=96, **PLAIN
    )


def _responses_and_messages() -> Iterator[Request]:
    yield response("plain")
    yield response("streamed", stream=True)
    yield response(
        "instructions and a list", instructions="Answer.", input=[{"role": "user", "content": RECALL}]
    )
    yield response("log-probs", include=["message.output_text.logprobs"], top_logprobs=2)
    yield message("plain")
    yield message("streamed", stream=True)
    yield message("system and stop", system="Answer.", stop_sequences=["prefill"], max_tokens=24)
    yield message("count_tokens", "/v1/messages/count_tokens")


def _plain() -> Iterator[Request]:
    yield Request("models", "/v1/models")
    yield Request("version", "/version")
    yield post("text", "/tokenize", model=MODEL, prompt=RECALL)
    yield post("text with token strings", "/tokenize", model=MODEL, prompt=RECALL, return_token_strs=True)
    yield post("messages", "/tokenize", model=MODEL, messages=[{"role": "user", "content": RECALL}])
    yield post("ids", "/detokenize", model=MODEL, tokens=[1, 6, 300, 301])


def _errors() -> Iterator[Request]:
    yield completion("error: unknown model", model="other")
    yield completion("error: max_tokens", max_tokens=-1)
    yield completion("error: temperature", temperature=-1)
    yield completion("error: top_p", top_p=2)
    yield completion("error: n", n=0)
    yield completion("error: n in words", n="many")
    yield completion("error: n of greedy", n=3)
    yield completion("error: logprobs", logprobs=10_000)
    yield completion("error: prompt_logprobs streamed", prompt_logprobs=1, stream=True)
    yield completion("error: token outside the vocabulary", prompt=[10_000_000])
    yield completion("error: prompt too long", prompt=[7] * 17_000)
    yield completion("error: empty prompt", prompt="")
    yield completion("error: no such stop", stop_token_ids="x")
    yield completion("error: min_tokens", min_tokens=20, max_tokens=4)
    yield completion("error: regex", structured_outputs={"regex": "["})
    yield completion("error: logit_bias", logit_bias={"5000": 1})
    yield completion("error: stream_options", stream_options={"include_usage": True})
    yield chat("error: top_logprobs", top_logprobs=3)
    yield chat("error: tool_choice", tool_choice="required")
    yield chat("error: role", messages=[{"role": 3, "content": "x"}])
    yield chat("error: no messages", messages=[])
    yield chat("error: unknown model", model="other")
    yield response("error: unknown model", model="other")
    yield message("error: unknown model", model="other")
    yield post("error: unknown model", "/tokenize", model="other", prompt="x")
    yield post("error: token", "/detokenize", model=MODEL, tokens=[-4])
    json_headers = {"Content-Type": "application/json"}
    for name, raw in (("no JSON", b"{no"), ("no object", b"[1]")):
        yield Request(f"completions: error: {name}", "/v1/completions", raw=raw, headers=json_headers)
    yield Request(
        "completions: error: no UTF-8",
        "/v1/completions",
        raw=b'{"prompt": "\xff"}',
        headers=json_headers,
        status_only=True,
    )
    yield Request("chat: error: empty body", "/v1/chat/completions", raw=b"", headers=json_headers)
    yield Request(
        "completions: error: content type",
        "/v1/completions",
        raw=b"a=b",
        headers={"Content-Type": "text/plain"},
    )
