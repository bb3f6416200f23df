# SPDX-License-Identifier: Apache-2.0
"""Showing what a cluster does: a live table on a terminal, plain lines elsewhere (`[  3.2 s] decode-0: …`)."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deltaserve.up.supervisor import Event

_COLOURS = {"ready": "green", "failed": "red", "restarting": "yellow", "held": "yellow", "stopped": "dim"}


class Display(Protocol):
    """Takes events from the supervisor's thread; a context manager around the start."""

    def __call__(self, event: Event) -> None:
        """Show one event."""
        ...

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Lines:
    """One line an event; for logs and pipes."""

    def __call__(self, event: Event) -> None:
        """Print the event."""
        print(f"[{event.at:5.1f} s] {event.name}: {event.text}", flush=True)

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class LiveTable:
    """A table that is redrawn while the cluster starts; afterwards events are lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[str, Event] = {}
        self._began = time.monotonic()
        self._live: Live | None = None
        self._lines = Lines()

    def __call__(self, event: Event) -> None:
        """Show the event."""
        if self._live is None:
            self._lines(event)
            return
        self._rows[event.name] = event

    def __enter__(self) -> Display:
        self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=8)
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _table(self) -> Table:
        now = time.monotonic() - self._began
        table = Table(title=f"deltaserve: starting, {now:.1f} s", title_justify="left", expand=False)
        for heading in ("process", "stage", "since"):
            table.add_column(heading, justify="right" if heading == "since" else "left")
        for name, event in list(self._rows.items()):
            colour = _COLOURS.get(event.state, "cyan")
            since = f"{event.at:.1f} s" if event.state == "ready" else f"{max(0.0, now - event.at):.1f} s ago"
            table.add_row(name, Text(event.text, style=colour), since)
        return table


def make_display() -> Display:
    """The live table when standard output is a terminal, lines otherwise."""
    return LiveTable(Console()) if sys.stdout.isatty() else Lines()
