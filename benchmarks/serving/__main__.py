# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.serving --out FOLDER [--device cuda] [--sides agg,nixl,delta] [--rates A,B,C]``.

A row that has been measured with the same arguments is not measured again, and a side without rows to measure is not
started: the same command goes on where an earlier one stopped. Ends with a table; the exit code is 1 when a side could
not be measured or a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.handoff.memory import machine
from benchmarks.serving import model, parts, sides, stats, table
from benchmarks.serving.held import Held
from benchmarks.serving.load import Load, Sent, run
from benchmarks.serving.sides import Aggregated, Delta, Nixl, Side, SideMissing, Sizes
from benchmarks.serving.workload import Arrival, Workload, arrivals
from deltaserve.up.devices import visible_devices
from deltaserve.up.errors import ClusterError

SIDES = ("agg", "nixl", "delta")
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        **{"prompt": 8192, "answer": 256, "rates": "4.75,8.14,11.5", "seconds": 20.0, "unit": 128},
        **{"max_num_seqs": 64, "max_num_batched_tokens": 8192, "kv_cache_bytes": 24 << 30},
        **{"segment_bytes": 8 << 30, "ttft_slo": 1.0, "tpot_slo": 0.0068},
    },
    "cpu": {
        **{"prompt": 300, "answer": 16, "rates": "0.5", "seconds": 8.0, "unit": 16},
        **{"max_num_seqs": 8, "max_num_batched_tokens": 2048, "kv_cache_bytes": 128 << 20},
        **{"segment_bytes": 256 << 20, "ttft_slo": 5.0, "tpot_slo": 0.5},
    },
}
"""Of options that are not given, by device."""
ENGINES = 2
"""Of each side."""
PATIENCE = 30.0
"""Seconds after a row's last request in which answers count."""
STOP_SECONDS = 60.0
"""In which sides that were started together end."""
ROW_SECONDS = 15.0
"""What a row takes besides its arrivals, at most: `--budget` leaves so much."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--out", type=Path, required=True, help="folder of results and logs")
    add("--device", choices=("cuda", "cpu"), default="cpu", help="what the engines run on")
    add("--sides", default=",".join(SIDES), help="which, in this order (default: %(default)s)")
    add("--model", type=Path, help="folder of the model; a random one is made for cuda, models/demo for cpu")
    add("--rates", help="requests a second, one row each")
    add("--seconds", type=float, help="arrivals of a row")
    add("--prompt", type=int, help="tokens of a prompt")
    add("--answer", type=int, help="tokens of an answer")
    add("--shared", type=int, default=0, help="first tokens that a row's prompts share")
    add("--seed", type=int, default=0, help="of arrivals and prompts")
    add("--ttft-slo", type=float, help="seconds to the first token of a good request")
    add("--tpot-slo", type=float, help="seconds between tokens of a good request")
    add("--max-num-seqs", type=int, help="requests that an engine runs at once")
    add("--max-num-batched-tokens", type=int, help="tokens of one engine step")
    add("--kv-cache-bytes", type=int, help="cache of an engine")
    add("--segment-bytes", type=int, help="what each worker of delta lends to the store")
    add("--unit", type=int, help="tokens; prefixes match in multiples of it")
    add(
        "--share-engines",
        action="store_true",
        help="measure agg on the engines of nixl, which saves a start; they carry its connector then",
    )
    add(
        "--together",
        action="store_true",
        help="start all sides at once and measure one after the other; an idle engine costs memory, and no time",
    )
    add("--delta", default="{}", help="JSON: fields of `deltaserve up` for the side delta")
    add(
        "--placement",
        choices=("", "handover", "local"),
        default="",
        help="of delta's requests; handover is what nixl does with every one (default: as its policy says)",
    )
    add("--label", default="", help="a name for this variant of delta in results and table")
    add(
        "--budget",
        type=float,
        default=0.0,
        help="start no row that could end after so many seconds; 0: no limit",
    )
    return made


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line with the device's defaults; what cannot be is refused by argparse."""
    made = parser()
    given = made.parse_args(arguments)
    for name, value in DEFAULTS[given.device].items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    try:
        given.sides = _names(given.sides)
        given.rates = [_positive("--rates", part) for part in str(given.rates).split(",")]
        _positive("--seconds", given.seconds)
        given.delta = json.loads(given.delta)
        if not isinstance(given.delta, dict):
            raise ValueError('--delta: give a JSON object, as {"router_options": {"policy": "price"}}')
        Workload(given.prompt, given.answer, given.shared)
    except ValueError as error:
        made.error(str(error))
    return given


def _names(text: str) -> list[str]:
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in SIDES]
    if unknown or not wanted:
        raise ValueError(
            f"--sides: {', '.join(unknown) or 'nothing'} is no side; choose among {', '.join(SIDES)}"
        )
    return wanted


def _positive(name: str, text: object) -> float:
    try:
        value = float(str(text))
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ValueError(f"{name}: {text} is no number above 0")
    return value


class Run:
    """One command: what is asked for, what is known already, how much time is left."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.began = given, time.monotonic()
        given.out.mkdir(parents=True, exist_ok=True)
        extra: dict[str, object] = {}
        folder = given.model
        if folder is None and given.device == "cuda":
            folder, extra = model.write(given.out / "bench-model"), {"load_format": "dummy"}
        self.sizes = Sizes(
            model=folder or model.DEMO,
            device=given.device,
            max_model_len=given.prompt + given.answer + 512,
            max_num_seqs=given.max_num_seqs,
            max_num_batched_tokens=given.max_num_batched_tokens,
            kv_cache_bytes=given.kv_cache_bytes,
            prefix_match_unit=given.unit,
            extra=extra,
            segment_bytes=given.segment_bytes,
        )
        vocab = int(json.loads((self.sizes.model / "config.json").read_text())["vocab_size"])
        self.workload = Workload(given.prompt, given.answer, given.shared, vocab, given.seed)
        self.slo = stats.Slo(given.ttft_slo, given.tpot_slo)
        self.gpus = min(ENGINES, len(visible_devices())) if given.device == "cuda" else 0
        """That the two engines of a side share."""
        self.warm = threading.Event()
        """Set when the kernels have been compiled, or nobody compiles them."""

    def asked(self, side: str) -> dict[str, Any]:
        """What a row of a side depends on, as JSON values."""
        given = self.given
        made: dict[str, Any] = {
            name: getattr(given, name) for name in (*DEFAULTS[given.device], "device", "shared", "seed")
        }
        made |= {"model": str(given.model or ""), "rates": None, "gpus": self.gpus}
        if side == "delta":
            made |= {"delta": given.delta, "placement": given.placement}
            made |= {"kernels": os.environ.get("DELTASERVE_STATE_KERNELS", "")}
        if side == "agg":
            made["share_engines"] = given.share_engines
        return made

    def file(self, side: str, rate: float) -> Path:
        """Where a row is kept."""
        label = f"-{self.given.label}" if side == "delta" and self.given.label else ""
        return Path(self.given.out / f"{side}{label}-{rate:g}.json")

    def known(self, side: str, rate: float) -> dict[str, Any] | None:
        """A row that has been measured with these arguments."""
        try:
            found = json.loads(self.file(side, rate).read_text())
            return dict(found["row"]) if found["asked"] == self.asked(side) else None
        except (OSError, ValueError, KeyError):
            return None

    def variants(self) -> list[dict[str, Any]]:
        """Rows of delta under other labels, measured with the same arguments but for its own."""

        own = ("delta", "kernels", "placement")

        def common(asked: dict[str, Any]) -> dict[str, Any]:
            return {key: value for key, value in asked.items() if key not in own}

        these = {self.file("delta", rate) for rate in self.given.rates}
        found = []
        for path in sorted(self.given.out.glob("delta-*.json")):
            with contextlib.suppress(OSError, ValueError, KeyError):
                document = json.loads(path.read_text())
                if path not in these and common(document["asked"]) == common(self.asked("delta")):
                    found.append(dict(document["row"]))
        return found

    def missing(self, side: str) -> list[float]:
        """Rates that a side has no row for."""
        return [rate for rate in self.given.rates if self.known(side, rate) is None]

    @property
    def out_of_time(self) -> bool:
        """Whether a row could end after the budget."""
        spent = time.monotonic() - self.began
        return bool(self.given.budget) and spent + self.given.seconds + ROW_SECONDS > self.given.budget

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.monotonic() - self.began:4.0f} s] {text}", file=sys.stderr, flush=True)

    def measure(self, side: Side) -> None:
        """The rows that are missing of a side that runs."""
        rates = self.missing(side.name)
        if rates and not self.out_of_time:
            self.say(f"{side.name}: warming up")
            self._warm_up(side)
        for rate in rates:
            if self.out_of_time:
                self.say(f"{side.name} {rate:g}: no time left")
                continue
            before = parts.counts(side)
            load = self._load(side, arrivals(self.workload, rate, self.given.seconds, side.name))
            made = stats.row(load, self.slo)
            made |= parts.of(side, load, parts.difference(parts.counts(side), before))
            label = f"-{self.given.label}" if side.name == "delta" and self.given.label else ""
            made |= {"side": f"{side.name}{label}", "rate": rate, "gpus": self.gpus}
            document = {"asked": self.asked(side.name), "machine": machine(), "row": made}
            self.file(side.name, rate).write_text(json.dumps(document, indent=1) + "\n")
            self.say(table.rows_table([made]).splitlines()[-1])
            for line in table.parts_lines([made]):
                self.say(line)

    def _load(self, side: Side, row: Sequence[Arrival]) -> Load:
        requests = [
            (Sent(arrival.at, arrival.answer), side.ask(number, arrival))
            for number, arrival in enumerate(row)
        ]
        return asyncio.run(run(requests, PATIENCE))

    def _warm_up(self, side: Side) -> None:
        """Requests alone, then some at once: what is compiled or learned at the first request is so before a row."""
        alone = side.warm_ups()
        for number, more in enumerate(alone):
            (one,) = arrivals(self.workload, 1.0, 1.0, f"alone {side.name} {number}")[:1]
            first = Arrival(0.0, one.prompt, min(8, one.answer))
            ask = side.ask(number, first, **more) if isinstance(side, Delta) else side.ask(number, first)
            self._checked(side, asyncio.run(run([(Sent(0.0, first.answer), ask)], 4 * PATIENCE)))
        number = min(8, self.given.max_num_seqs)
        some = arrivals(self.workload, float(number), 1.0, f"some {side.name}")[:number]
        self._checked(
            side, self._load(side, [Arrival(0.1 * n, one.prompt, one.answer) for n, one in enumerate(some)])
        )

    def _checked(self, side: Side, load: Load) -> None:
        for sent in load.sent:
            if sent.error:
                raise RuntimeError(f"{side.name}: a request before the first row failed: {sent.error}")


@contextlib.contextmanager
def started(run: Run, name: str) -> Iterator[list[Side]]:
    """A side that runs, or two on the same engines."""
    run.say(f"{name}: starting")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")  # an engine says how much its cache holds
    out = run.given.out
    if name == "delta":
        if run.given.together:
            run.warm.wait()
        with sides.delta(run.sizes, out, run.given.delta, run.given.placement) as delta:
            yield [delta]
        return
    try:
        with sides.engines(run.sizes, out, name, nixl=name == "nixl", warm=run.warm.set) as urls:
            found: list[Side] = [Nixl(urls)] if name == "nixl" else []
            if name == "agg" or run.given.share_engines:
                found.append(Aggregated(urls))
            for side in found:
                side.logs = [out / f"{name}-{number}.log" for number in range(len(urls))]
            yield found
    finally:
        run.warm.set()


def _to_start(run: Run) -> dict[str, list[str]]:
    """What has to be started, and the sides that are measured on it."""
    asked, found = run.given.sides, {}
    shared = run.given.share_engines and {"nixl", "agg"} <= set(asked)
    for name in asked:
        if name == "agg" and shared:
            continue
        found[name] = ["agg", "nixl"] if name == "nixl" and shared else [name]
        if not any(run.missing(side) for side in found[name]):
            run.say(f"{name}: known")
            del found[name]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's description."""
    given = options(arguments)
    run = Run(given)
    failed = []
    wanted = _to_start(run)
    if not wanted.keys() - {"delta"}:
        run.warm.set()
    starting = {name: Held(functools.partial(started, run, name)) for name in wanted if given.together}
    try:
        for name, measured in wanted.items():
            if run.out_of_time:
                run.say(f"{name}: no time left")
                continue
            try:
                with contextlib.ExitStack() as stack:
                    running = (
                        starting[name].value()
                        if name in starting
                        else stack.enter_context(started(run, name))
                    )
                    run.say(f"{name}: ready")
                    for side in running:
                        if side.name in measured:
                            run.measure(side)
            except (SideMissing, ClusterError, RuntimeError, OSError) as error:
                run.say(f"{name}: NOT MEASURED: {error}")
                failed.append(name)
    finally:
        run.warm.set()
        for side_held in starting.values():
            side_held.close(STOP_SECONDS)
    rows = [row for name in given.sides for rate in given.rates if (row := run.known(name, rate)) is not None]
    whole = len(rows) == len(given.sides) * len(given.rates)
    if "delta" in given.sides:
        rows += run.variants()
    print(f"SLO: TTFT < {given.ttft_slo:g} s, TPOT < {given.tpot_slo * 1e3:g} ms; times in ms\n")
    print(table.rows_table(rows))
    for line in (*table.parts_lines(rows), *table.aims(rows)):
        print(line)
    return 1 if failed or not whole or any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
