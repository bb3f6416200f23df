# SPDX-License-Identifier: Apache-2.0
"""The form of vLLM's answers that are not streamed, learned from vLLM as chunks.py learns that of events."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from json.encoder import encode_basestring as quote
from typing import Any

from router.faces.chunks import FINISH, ID, MODEL, STOP, TEXT, FormChanged, compact, counted, made_up

_PLACES = {
    "text": f'"{TEXT}"',
    "id": f'"{ID}"',
    "model": f'"{MODEL}"',
    "stop": f'"{STOP}"',
    "finish": f'"finish_reason":"{FINISH}"',
    "metrics": '"metrics":null',
}
_COUNTS, _TOTAL = ("@prompt@", "@completion@"), "@total@"
CACHED = ("cached_tokens", "created_cache_tokens")
"""What `cached` has in `WholeForm.fill`."""
_CREATED = re.compile(r'"created":\d+')


def _cached(name: str) -> str:
    return f"@{name}@"


@dataclass(frozen=True)
class WholeForm:
    """An answer, cut where requests differ; `places` names what goes between the pieces, in order."""

    pieces: tuple[str, ...]
    places: tuple[str, ...]
    usage: dict[str, Any]

    @functools.cached_property
    def _usage(self) -> str:
        """`usage` as JSON, with marks in the places of a request's numbers."""
        marks = {name: _cached(name) for name in CACHED}
        usage: dict[str, Any] = counted(self.usage, 0, 0, marks)  # type: ignore[arg-type]
        usage |= dict(zip(("prompt_tokens", "completion_tokens"), _COUNTS, strict=True))
        text = compact(usage | {"total_tokens": _TOTAL})
        for mark in (*_COUNTS, _TOTAL, *marks.values()):
            text = text.replace(f'"{mark}"', mark)
        return text

    def fill(
        self,
        *,
        response_id: str,
        model: str,
        created: int,
        text: str,
        finish_reason: str,
        stop_reason: int | str | None,
        prompt_tokens: int,
        completion_tokens: int,
        cached: dict[str, int],
        metrics: str = "null",
    ) -> bytes:
        """The answer's JSON. `cached`: as in `chunks.counted`; `metrics`: JSON of what vLLM says of drafts."""
        usage = self._usage
        for mark, value in zip(_COUNTS, (prompt_tokens, completion_tokens), strict=True):
            usage = usage.replace(mark, str(value))
        usage = usage.replace(_TOTAL, str(prompt_tokens + completion_tokens))
        for name, value in cached.items():
            usage = usage.replace(_cached(name), str(value))
        values = {
            "text": quote(text),
            "id": quote(response_id),
            "model": quote(model),
            "stop": compact(stop_reason),
            "finish": f'"finish_reason":{quote(finish_reason)}',
            "created": f'"created":{created}',
            "usage": usage,
            "metrics": f'"metrics":{metrics}',
        }
        parts = [self.pieces[0]]
        for place, piece in zip(self.places, self.pieces[1:], strict=True):
            parts += (values[place], piece)
        return "".join(parts).encode()


async def learn_whole(generate: Callable[[AsyncIterator[Any]], Awaitable[Any]]) -> WholeForm:
    """Have one made-up output answered, and cut the answer. Raises FormChanged."""
    outputs = [output async for output in made_up()]

    async def last() -> AsyncIterator[Any]:
        yield outputs[-1]

    data: str = (await generate(last())).model_dump_json()
    usage = json.loads(data)["usage"]
    created = _CREATED.search(data)
    marks = {
        **_PLACES,
        "usage": compact(usage),
        "created": created[0] if created else '"created":7',
    }
    for name, mark in marks.items():
        if data.count(mark) != 1:
            raise FormChanged(f"vLLM's answer has its {name} {data.count(mark)} times, not once: {data}")
    places = sorted(marks, key=lambda name: data.index(marks[name]))
    pieces = []
    for name in places:
        piece, data = data.split(marks[name], 1)
        pieces.append(piece)
    return WholeForm((*pieces, data), tuple(places), usage)


def draft_metrics(counts: Any) -> str:
    """The JSON of an answer's `metrics`, where its worker counts what drafts did for each request."""
    from vllm.entrypoints.generate.base.protocol import PerRequestMetrics, SpeculativeDecodingMetrics

    of_drafts = SpeculativeDecodingMetrics(**counts.to_dict())
    return PerRequestMetrics(speculative_decoding=of_drafts).model_dump_json()
