# SPDX-License-Identifier: Apache-2.0
"""One real engine that schedules steps ahead: ends of answers that stop by themselves, and the next turns from them.

`python -m tests.unit.statestore.ahead_probe` prints one line of JSON; test_ahead_engine.py says what must hold.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

from statestore.connector import scheduler_half
from statestore.connector.intents import LoadIntent
from statestore.connector.links import Links
from tests.unit.statestore.connector_probe import ANSWER, DEMO, Probe, answer


def stopping(probe: Probe, text: list[int], end: int) -> tuple[list[int], int]:
    """A prompt, and a token that its answer has for the first time as token number `end` of both."""
    for before in range(2, ANSWER):
        prompt = text[: end - before]
        probe.forget()
        tokens = probe.run(prompt)["tokens"]
        if tokens.index(tokens[before - 1]) == before - 1:
            return prompt, tokens[before - 1]
    raise AssertionError("the answers repeat themselves")


def turn(probe: Probe, prompt: list[int], more: list[int], **options: Any) -> dict[str, Any]:
    """An answer whose end is kept; the next turn from it, and the same computed as a whole."""
    probe.forget()
    first = probe.run(prompt, publish=probe.intent(None), **options)
    if "written" not in first["events"]:
        return {"failed": first["events"]["publish_failed"][0]}
    (end,) = first["events"]["written"]
    talk = [*prompt, *first["tokens"], *more]
    kept = probe.commit(end.epoch, end.links)
    probe.forget()
    plain = answer(probe.run(talk))
    probe.forget()
    return {
        "length": end.length,
        "history": len(prompt) + len(first["tokens"]),
        "tokens": end.tokens == talk[: end.length],
        "failure": end.failure,
        "plain": plain,
        "next": answer(probe.run(talk, load=LoadIntent(tuple(kept)))),
    }


def one_short(links: Links, computed: int) -> Any:
    """The mistake: the end before the step ahead, whose state that step has overwritten."""
    return links._send(computed - 1, final=True)


def main() -> None:
    prompts = [p["prompt"] for p in json.loads((DEMO / "prompts.json").read_text()) if p["length"] == 1000]
    text, more = prompts[0], prompts[2][:70]
    probe = Probe(ahead=True)
    core = probe.host.core
    found: dict[str, Any] = {
        "scheduler": type(core.scheduler).__name__,
        "queue": core.batch_queue_size,
        "block": probe.block,
    }
    block = probe.block
    # The last token inside a block, as the first of a block, and as its last.
    for name, end in (("inside", 3 * block + 40), ("first", 3 * block + 1), ("last", 4 * block)):
        prompt, stop = stopping(probe, text, end)
        found[name] = turn(probe, prompt, more, stop=[stop])
        if name == "inside":
            with mock.patch.object(Links, "finish", one_short):
                found["one_short"] = turn(probe, prompt, more, stop=[stop])
            with mock.patch.object(scheduler_half, "_one_ahead", return_value=False):
                found["held_back"] = turn(probe, prompt, more, stop=[stop])
    # No step is ahead of an answer that reaches its limit.
    found["limit"] = turn(probe, text[:300], more)
    probe.forget()
    found["used"] = probe.used_blocks()
    print("PROBE " + json.dumps(found), flush=True)
    probe.host.stop(10)


if __name__ == "__main__":
    main()
