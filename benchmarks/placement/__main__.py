# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.placement`; see the package's description."""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from deltaserve.config import Role
from deltaserve.membership import DrainOrder, Member, Membership, View
from deltaserve.wire import worker_pb2 as pb
from router.chooser import Chooser
from router.cooldown import Cooldown
from router.flight import Flight
from router.metrics import Metrics
from router.policy import POLICIES, Prompt, make
from router.roster import Roster
from router.trace import Trace
from router.worker_link import WorkerLink

AIMS = {64: 200.0, 1000: 1000.0}
"""Microseconds at p99, by workers."""
SHARED = 16
"""Beginnings that prompts share."""


class Register(Membership):
    """Nobody joins; the roster is filled by hand."""

    async def join(self, member: Member) -> Member:
        return member

    async def update(self, member: Member) -> None:
        return

    async def drain_order(self) -> DrainOrder:
        return DrainOrder()

    async def drained(self, moved: int) -> None:
        return

    async def leave(self) -> None:
        return

    async def watch(self) -> AsyncIterator[View]:
        yield View((), connected=True)

    async def close(self) -> None:
        return


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    made.add_argument("--quick", action="store_true", help="few decisions: a look, not a measurement")
    return made


def prompts(count: int, noise: random.Random) -> list[Prompt]:
    """Prompts that share beginnings; their digests are not computed yet."""
    beginnings = [[noise.randrange(100_000) for _ in range(6000)] for _ in range(SHARED)]
    made = []
    for _ in range(count):
        length = noise.choice((200, 500, 1000, 2000, 4000, 8000))
        shared = noise.choice(beginnings)[: length * 3 // 4]
        made.append(Prompt([*shared, *(noise.randrange(100_000) for _ in range(length - len(shared)))]))
    return made


def measure(choose: Callable[[Flight], object], wanted: Sequence[Flight]) -> dict[str, float]:
    """Microseconds of one decision: of the processor, and by the clock, in which others' work counts too."""
    times, clock = [], []
    gc.collect()
    gc.freeze()  # as the router does when it begins to serve: what waits here to be placed is no garbage to look for
    for flight in wanted:
        began, started = time.perf_counter_ns(), time.thread_time_ns()
        choose(flight)
        times.append((time.thread_time_ns() - started) / 1000)
        clock.append((time.perf_counter_ns() - began) / 1000)
    times.sort()
    clock.sort()
    middle, late = len(times) // 2, len(times) * 99 // 100
    return {"p50": times[middle], "p99": times[late], "worst": times[-1], "clock_p99": clock[late]}


def run(decisions: int) -> list[dict[str, Any]]:
    """A row for each policy and number of workers."""
    return [row for count in AIMS for row in run_size(count, decisions)]


def busy_link(role: Role, number: int, noise: random.Random) -> WorkerLink:
    """A link that takes requests and has some already; nothing is at its other end."""
    member = Member(f"{role}-{number}", role, "", "digest", "geometry", 1)
    link = WorkerLink(member, None)  # type: ignore[arg-type]  # no event will come of it
    link.description = pb.WorkerDescription(state_bytes=1_500_000, token_bytes=4_600)
    link.outstanding, link.state_bytes = noise.randrange(20_000), noise.randrange(1 << 30)
    link.legs = dict.fromkeys(range(noise.randrange(64)))  # type: ignore[assignment]  # their number counts
    link.up = True
    return link


def as_flight(prompt: Prompt) -> Flight:
    """A request with this prompt, as the dispatcher has it when it is to be placed."""
    trace = Trace("", prompt.length, "auto", 0.0)
    return Flight(
        None,  # type: ignore[arg-type]  # a placement does not look at the request itself
        Prompt(prompt.tokens),
        b"",
        prompt.length,
        512,
        False,
        "auto",
        trace,
        0.0,
        0.0,
    )


def run_size(count: int, decisions: int) -> list[dict[str, Any]]:
    """The rows of one number of workers."""
    noise = random.Random(1)
    decodes = [busy_link("decode", i, noise) for i in range(count // 2)]
    prefills = [busy_link("prefill", i, noise) for i in range(count - count // 2)]
    # Never started, so it tells nobody of events.
    roster = Roster(Register(), None, Metrics(CollectorRegistry()))  # type: ignore[arg-type]
    roster._links = {link.worker_id: link for link in (*decodes, *prefills)}

    def row(name: str, choose: Callable[[Flight], object]) -> dict[str, Any]:
        found = measure(choose, [as_flight(prompt) for prompt in prompts(decisions, noise)])
        return {"workers": count, "policy": name, "aim_p99": AIMS[count], **found}

    rows = []
    for name in POLICIES:
        policy = make(name, 256)
        for prompt in prompts(300, noise):
            policy.ended(noise.choice(decodes).worker_id, prompt, [5] * 100)
            policy.prefilled(
                noise.choice(prefills).worker_id, prompt, prompt.length, prompt.length / 2000, True
            )
        rows.append(row(name, Chooser(policy, roster, Cooldown()).choose))
    rows.append(row("(random)", lambda flight: noise.choice(decodes)))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 when an aim is missed."""
    options = parser().parse_args(arguments)
    rows = run(100 if options.quick else 2000)
    print(
        f"{'workers':>7}  {'policy':<9} {'p50 µs':>8} {'p99 µs':>8} {'worst µs':>9} {'p99 by the clock':>17}   aim p99"
    )
    for row in rows:
        print(
            f"{row['workers']:>7}  {row['policy']:<9} {row['p50']:>8.1f} {row['p99']:>8.1f} {row['worst']:>9.1f} "
            f"{row['clock_p99']:>17.1f}   "
            f"{row['aim_p99']:.0f}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["p99"] > row["aim_p99"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
