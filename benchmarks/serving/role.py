# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.serving.role FOLDER ROLE ...`: a role of the cluster that notes the steps of each handoff.

What a role does is unchanged: calls between its parts are wrapped, and each leaves its begin and end (of the machine's
monotonic clock) in `FOLDER/<role>-<pid>.jsonl`. Moments carry the response's id; what the store path does below them
(gather, digest, put, get, scatter) is noted without, because copies and puts know no request. Ranks that are processes
of their own (tensor parallelism) are not seen. A name that is not there any more is said on standard error, and its
stage is missing in the breakdown.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FLUSH_SECONDS = 0.5
Line = tuple[str, str, float, float]
"""Name, response id ("": none), begin and end in seconds."""

STAGES = {
    "gather": (
        ("statestore.connector.cache_view", "CacheView", ("prove_heads", "prove_rows", "gather_rows")),
        ("statestore.connector.device_copies", "DeviceCopies", ("gather_heads",)),
    ),
    "digest": (
        ("statestore.connector.proofs", "HeadsProof", ("take",)),
        ("statestore.connector.proofs", "RowsProof", ("take",)),
        ("statestore.connector.cache_view", "CacheView", ("check_heads", "check_rows")),
    ),
    "put": (("statestore.mooncake_pool", "MooncakePool", ("write", "complete")),),
    "reserve": (("statestore.mooncake_pool", "MooncakePool", ("reserve_all",)),),
    "get": (
        ("statestore.mooncake_pool", "MooncakePool", ("get_into", "get_ranges")),
        ("statestore.connector.loading", "", ("copy_from_home",)),
    ),
    "scatter": (("statestore.connector.cache_view", "CacheView", ("scatter_heads", "scatter_rows")),),
}
"""By stage: (module, class or "" for a function of the module, names)."""


class Notes:
    """Lines of this process, written by a thread of their own."""

    def __init__(self, path: Path) -> None:
        self._lines: list[Line] = []
        self._path = path
        self.ids: dict[str, str] = {}
        """Response id by the request's name in the engine."""
        threading.Thread(target=self._write, name="notes", daemon=True).start()

    def add(self, name: str, request_id: str, begin: float, end: float | None = None) -> None:
        """A moment, or a stretch."""
        self._lines.append((name, request_id, begin, begin if end is None else end))

    def of(self, key: str) -> str:
        """The response's id of the engine's name."""
        return self.ids.get(key, "")

    def _write(self) -> None:
        with self._path.open("a") as file:
            while True:
                time.sleep(FLUSH_SECONDS)
                lines, self._lines = self._lines, []
                file.writelines(json.dumps(line) + "\n" for line in lines)
                file.flush()


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace `owner.name` by `around(original, *arguments)`; awaited where the original is."""
    original = getattr(owner, name, None)
    if original is None:
        print(f"{getattr(owner, '__name__', owner)}.{name} is not there; it is not noted", file=sys.stderr)
        return

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, run)


def stretch(notes: Notes, stage: str) -> Callable[..., Any]:
    """An `around` that notes how long each call takes."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        try:
            return original(*args, **kwargs)
        finally:
            notes.add(stage, "", begin, time.monotonic())

    return around


def install(notes: Notes) -> None:
    """Wrap everything. To be called when vLLM may be imported."""
    for stage, places in STAGES.items():
        for module, owner, names in places:
            found = importlib.import_module(module)
            for name in names:
                wrap(getattr(found, owner) if owner else found, name, stretch(notes, stage))
    _publishing(notes)
    _loading(notes)
    _roles(notes)


def _publishing(notes: Notes) -> None:
    def publish(original: Any, self: Any, job: Any, report: Any, *rest: Any, **named: Any) -> Any:
        bound = inspect.signature(original).bind(self, job, report, *rest, **named)
        bound.apply_defaults()
        if (wait := bound.arguments.get("computed")) is not None:

            def computed() -> None:
                wait()
                notes.add("computed", notes.of(job.key), time.monotonic())

            bound.arguments["computed"] = computed
        result = original(*bound.args, **bound.kwargs)
        notes.add("written", notes.of(job.key), time.monotonic())
        return result

    wrap(importlib.import_module("statestore.connector.publishing").Publisher, "publish", publish)


def _loading(notes: Notes) -> None:
    def load(original: Any, self: Any, job: Any, *rest: Any, **named: Any) -> Any:
        begin = time.monotonic()
        result = original(self, job, *rest, **named)
        notes.add("load", notes.of(job.key), begin, time.monotonic())
        return result

    wrap(importlib.import_module("statestore.connector.loading").Loader, "load", load)


def _roles(notes: Notes) -> None:
    from deltaserve.telemetry.logs import client_id

    def prepare(original: Any, self: Any, job: Any) -> Any:
        notes.ids[job.key] = client_id(job.add.request_id)

        async def run() -> Any:
            begin = time.monotonic()
            try:
                return await original(self, job)
            finally:
                notes.add("prepare", notes.of(job.key), begin, time.monotonic())

        return run()

    def settle(original: Any, self: Any, job: Any, outcome: Any) -> Any:
        async def run() -> Any:
            begin = time.monotonic()
            try:
                return await original(self, job, outcome)
            finally:
                notes.add("commit", notes.of(job.key), begin, time.monotonic())

        return run()

    def restored(original: Any, self: Any, job: Any, *rest: Any) -> Any:
        notes.add("restored", notes.of(job.key), time.monotonic())
        return original(self, job, *rest)

    def output(original: Any, self: Any, job: Any, *rest: Any) -> Any:
        if not job.answered:
            notes.add("first", notes.of(job.key), time.monotonic())
        return original(self, job, *rest)

    prefill = importlib.import_module("prefill_worker.role").PrefillRole
    decode = importlib.import_module("decode_worker.role").DecodeRole
    for role in (prefill, decode):
        wrap(role, "prepare", prepare)
    wrap(prefill, "_settle", settle)
    wrap(decode, "on_restored", restored)
    wrap(decode, "on_output", output)


def install_router(notes: Notes) -> None:
    """Note when the router has a request's first token. To be called when vLLM may be imported."""

    def first(original: Any, self: Any, flight: Any, *rest: Any) -> Any:
        notes.add("routed", flight.name, time.monotonic())
        return original(self, flight, *rest)

    wrap(importlib.import_module("router.dispatcher").Dispatcher, "_first_output", first)


def main() -> int:
    """Run the role."""
    folder, role = Path(sys.argv[1]), sys.argv[2]
    sys.argv = ["deltaserve", *sys.argv[2:]]
    from deltaserve.cli.main import main as command_line

    if role in ("prefill", "decode"):
        from deltaserve.engine import worker

        notes = Notes(folder / f"{role}-{os.getpid()}.jsonl")
        start = worker._start_engine

        def started(*args: Any, **kwargs: Any) -> Any:
            install(notes)
            return start(*args, **kwargs)

        worker._start_engine = started
    elif role == "router":
        router = importlib.import_module("router.main")
        notes = Notes(folder / f"{role}-{os.getpid()}.jsonl")
        serve = router._main

        async def served(*args: Any, **kwargs: Any) -> Any:
            install_router(notes)
            return await serve(*args, **kwargs)

        router._main = served
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
