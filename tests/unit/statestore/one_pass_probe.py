# SPDX-License-Identifier: Apache-2.0
"""One real engine whose KDA layers take a state inside a pass; `python -m tests.unit.statestore.one_pass_probe`.

Prints one line of JSON: the links of a prompt in one pass and in two, and the prompt's answers from each link.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

from statestore.connector.inside import Inside
from statestore.connector.intents import LoadIntent
from tests.unit.statestore.connector_probe import DEMO, Probe, answer, from_each_link

CHUNK = 1024


def passes(outcome: Any) -> list[int]:
    return [outcome.passes.steps, outcome.passes.computed, outcome.passes.again]


def run(probe: Probe, prompt: list[int]) -> dict[str, Any]:
    """Publish all but the last token; restore the prompt from every link."""
    probe.forget()
    plain = probe.run(prompt)
    probe.forget()
    outcome, chain = probe.publish(prompt[:-1])
    found: dict[str, Any] = {
        "plain": answer(plain),
        "links": [[link.base, link.length] for link in outcome.links],
        "passes": passes(outcome),
        "from_link": from_each_link(probe, prompt, chain),
    }
    if len(chain) > 1:
        # A longer prompt goes on from the checkpoint, and is one pass again.
        probe.forget()
        longer = [*prompt[:-1], *prompt[:300]]
        again, rested = probe.publish(longer, chain[:1], load=LoadIntent(tuple(chain[:1])))
        found["longer"] = {
            "links": [[link.base, link.length] for link in again.links],
            "passes": passes(again),
        }
        probe.forget()
        found["longer_plain"] = answer(probe.run([*longer, 7]))
        probe.forget()
        found["longer_from"] = answer(probe.run([*longer, 7], load=LoadIntent(tuple(rested))))
    return found


def main() -> None:
    prompt = next(
        p["prompt"] for p in json.loads((DEMO / "prompts.json").read_text()) if p["length"] == 1000
    )[:700]
    probe = Probe(
        CHUNK,
        max_num_scheduled_tokens=CHUNK,
        long_prefill_token_threshold=0,
        additional_config={"kda_prefill_checkpoint": True},
    )
    found: dict[str, Any] = {"block": probe.block, "one": run(probe, prompt)}
    # Control: the state of the pass's end under the checkpoint's name.
    import statestore.connector.scheduler_half as half

    taken = half.last_inside

    def wrong(offers: Any, recurrent: Any, tables: Any, first: int, end: int) -> Any:
        inside = taken(offers, recurrent, tables, first, end)
        last = {group: tables[group][-(-end // probe.block) - 1] for group in recurrent}
        return inside and Inside(inside.length, last)

    with mock.patch.object(half, "last_inside", wrong):
        found["wrong"] = run(probe, prompt)
    with mock.patch.object(half, "last_inside", return_value=None):
        found["none"] = run(probe, prompt)
    print("PROBE " + json.dumps(found), flush=True)
    probe.host.stop(10)


if __name__ == "__main__":
    main()
