# SPDX-License-Identifier: Apache-2.0
"""Answers of two OpenAI endpoints, made comparable, and compared.

What may differ between two servers that are otherwise the same:

    ids and times               masked; the form of an id (`chatcmpl-…`) and that a time is one must agree
    system_fingerprint          digest of a server's own configuration: masked behind `vllm-<version>-`
    where a stream is cut       pieces are joined: texts, arguments and token lists of a choice; the kinds of events,
                                their order, and everything else in them must agree
    log-probs                   within TOLERANCE; which tokens, and in which order, must agree
    cached tokens               taken out; `cached_tokens_differ` has the rule
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

TOLERANCE = 1e-3
"""Nats, between log-probs of the same token."""
TIMES = frozenset({"created", "created_at", "completed_at"})
IDS = frozenset({"id", "item_id", "call_id", "response_id", "request_id", "signature", "system_fingerprint"})
CACHED = frozenset(
    {
        "cached_tokens",
        "cached_tokens_per_turn",
        "created_cache_tokens",
        "cache_write_tokens",
        "cache_creation_input_tokens",
        "cache_read_input_tokens",
    }
)
JOINED = frozenset({"text", "content", "reasoning", "arguments", "delta", "partial_json", "thinking"})
"""Strings that a stream sends in pieces."""
_HEX = re.compile(r"[0-9a-f]{8,}|[0-9a-f]{8}-[0-9a-f-]{27}")


@dataclass(frozen=True)
class Answer:
    """One answer as it came."""

    status: int
    body: str
    streamed: bool = False
    trace: dict[str, Any] | None = None
    """The router's, where there is one."""

    def document(self) -> Any:
        """What can be compared with another answer's."""
        if self.streamed and self.status == 200:
            return [self.status, _joined(events(self.body))]
        try:
            return [self.status, masked(json.loads(self.body))]
        except ValueError:
            return [self.status, self.body]

    def cached(self) -> int | None:
        """Cached prompt tokens that the answer reports, the largest if several places do; None: it reports none."""
        found = re.findall(r'"(?:cached_tokens|cache_read_input_tokens)": ?(\d+)', self.body)
        return max(map(int, found), default=None)

    def prompt_tokens(self) -> int:
        """Prompt tokens that the answer reports; 0 when it reports none."""
        found = re.findall(r'"(?:prompt_tokens|input_tokens)": ?(\d+)', self.body)
        return max(map(int, found), default=0)

    def response_id(self) -> str:
        """The first id in the answer; empty when there is none."""
        found = re.search(r'"id": ?"([^"]+)"', self.body)
        return found.group(1) if found else ""


def events(body: str) -> list[tuple[str, Any]]:
    """The events of a stream: name (empty without one) and JSON document, or the text where it is none."""
    found: list[tuple[str, Any]] = []
    for block in re.split(r"\r?\n\r?\n", body.strip()):
        lines = dict(line.partition(":")[::2] for line in block.splitlines() if line)
        data = lines.get("data", "").strip()
        try:
            found.append((lines.get("event", "").strip(), json.loads(data)))
        except ValueError:
            found.append((lines.get("event", "").strip(), data))
    return found


def masked(value: Any, key: str = "") -> Any:
    """`value` without what two servers cannot have in common, see the module's description."""
    if isinstance(value, dict):
        return {name: masked(item, name) for name, item in value.items() if name not in CACHED}
    if isinstance(value, list):
        return [masked(item, key) for item in value]
    if key in TIMES and isinstance(value, int | float) and not isinstance(value, bool):
        return "a time"
    if key in IDS and isinstance(value, str):
        return _HEX.sub("*", value)
    return value


def _joined(found: list[tuple[str, Any]]) -> list[Any]:
    """Events that follow each other and are of one kind, as one."""
    parts: list[Any] = []
    kinds: list[tuple[str, str]] = []
    for name, data in found:
        data = masked(data)
        kind = (name, str(data.get("type") or data.get("object")) if isinstance(data, dict) else str(data))
        if kinds and kind == kinds[-1] and isinstance(data, dict):
            parts[-1] = _merge(parts[-1], data)
        else:
            kinds.append(kind)
            parts.append(data)
    return [[list(kind), part] for kind, part in zip(kinds, parts, strict=True)]


def _merge(old: Any, new: Any, key: str = "") -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {
            name: _merge(old.get(name), new.get(name, old.get(name)), name) if name in new else old[name]
            for name in {**old, **new}
        }
    if isinstance(old, list) and isinstance(new, list):
        if all(isinstance(item, dict) and "index" in item for item in [*old, *new]):
            by_index = {item["index"]: item for item in old}
            for item in new:
                number = item["index"]
                by_index[number] = _merge(by_index[number], item) if number in by_index else item
            return [by_index[number] for number in sorted(by_index)]
        return [*old, *new]
    if key in JOINED and isinstance(old, str) and isinstance(new, str):
        return old + new
    if key == "sequence_number":
        return "rising"
    return old if new is None else new


def differences(single: Any, cluster: Any, path: str = "", limit: int = 8) -> list[str]:
    """Where two documents differ, in words; at most `limit` places."""
    found: list[str] = []
    _compare(single, cluster, path or "$", found)
    return found[:limit]


def _compare(single: Any, cluster: Any, path: str, found: list[str]) -> None:
    if isinstance(single, dict) and isinstance(cluster, dict):
        for name in sorted({*single, *cluster}):
            if name not in single or name not in cluster:
                where = "the cluster" if name in cluster else "the single server"
                found.append(f"{path}.{name}: only {where} has it")
            elif name != "sequence_number":
                _compare(single[name], cluster[name], f"{path}.{name}", found)
    elif isinstance(single, list) and isinstance(cluster, list):
        if len(single) != len(cluster):
            found.append(
                f"{path}: {len(single)} items, the cluster has {len(cluster)}: {single!r} {cluster!r}"[:600]
            )
        for number, (one, other) in enumerate(zip(single, cluster, strict=False)):
            _compare(one, other, f"{path}[{number}]", found)
    elif isinstance(single, float) and isinstance(cluster, int | float):
        if abs(single - cluster) > TOLERANCE:
            found.append(f"{path}: {single!r}, the cluster has {cluster!r}")
    elif single != cluster or isinstance(single, bool) != isinstance(cluster, bool):
        found.append(f"{path}: {single!r}, the cluster has {cluster!r}"[:600])


def cached_tokens_differ(single: Answer, cluster: Answer, unit: int = 16) -> str:
    """How the cluster's cached tokens break the rule; empty: they do not.

    A prompt token is cached when no worker computed it for this request, because an earlier request had left its state
    in a worker's cache or in a checkpoint. What a prefill worker computed for this very request is not cached, although
    the decode worker reads it from the store. So: the cluster reports what its own trace says was reused; a prompt that
    a single server finds nothing of has nothing cached here either when it comes for the first time; and of one whose
    beginning a single server finds again, the cluster finds it up to one prefix unit less, since a prefill worker
    computes N-1 tokens and must compute one.
    """
    ours, theirs, trace = cluster.cached(), single.cached(), cluster.trace
    if ours is None or theirs is None:
        return "" if ours == theirs else f"{ours} tokens are cached, a single server says {theirs}"
    if not 0 <= ours <= max(0, cluster.prompt_tokens()):
        return f"{ours} of {cluster.prompt_tokens()} prompt tokens are cached"
    if trace is None:
        return ""
    if "parts" not in trace:
        reused = trace["prefill_cached"] + trace["prefill_restored"] if trace["boundary"] else trace["local"]
        if ours != reused:
            return f"{ours} tokens are reported as cached, the trace says {reused}"
    if trace["boundary"] and not theirs - unit <= ours <= theirs:
        return f"{ours} tokens are cached, a single server has {theirs}"
    return ""
