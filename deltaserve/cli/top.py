# SPDX-License-Identifier: Apache-2.0
"""`deltaserve top`: the router's status page in a terminal, drawn anew once a second.

It reads GET /ui/state (docs/observe.md has the fields) and shows pools, handoffs rank by rank, times to first token and
between tokens, choices with their reasons, and faults. Ctrl-C ends it.
"""

from __future__ import annotations

import sys
import time
from http.client import HTTPException
from typing import Any, TextIO
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deltaserve.config import TopConfig
from deltaserve.documents import parse_json

TIMEOUT = 10.0
HANDOFFS, REQUESTS, FAULTS = 12, 12, 6
"""Rows shown of each."""
GIVE_WAY = {"worker": 2, "request": 2, "why": 3, "what": 3, "error": 3}
"""Columns that share what the others leave on a narrow terminal, and their shares."""
FIELDS = {
    *("status", "model", "placement", "policy", "uptime", "time", "requests"),
    *("latency", "missing", "pools", "boundaries", "choices", "recent", "faults"),
}
"""What a router's state has, as far as it is drawn here."""
_COLOURS = {
    **dict.fromkeys(("ok", "ready", "committed", "loaded", "finished", "done"), "green"),
    **dict.fromkeys(("degraded", "draining", "stalled", "warning"), "yellow"),
    **dict.fromkeys(("unavailable", "away", "failed", "error", "critical"), "red"),
    **dict.fromkeys(("running", "busy", "writing", "reading", "committing", "computing"), "cyan"),
}


class Unreachable(Exception):
    """The router does not answer; the message is for the operator."""


def run(config: TopConfig) -> int:
    """Draw until Ctrl-C, or once; 1 when the router never answered."""
    url = config.endpoint.rstrip("/")
    if config.once:
        try:
            state = fetch(url, config.api_key)
        except Unreachable as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        draw(state, "", sys.stdout, config.width)
        return 0
    console = Console(width=config.width or None)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                drawn = screen(fetch(url, config.api_key))
            except Unreachable as error:
                drawn = Panel(Text(str(error), style="red"), title="deltaserve")
            live.update(drawn, refresh=True)
            time.sleep(config.interval)


def fetch(url: str, api_key: str = "") -> dict[str, Any]:
    """The router's state. Raises Unreachable with the reason and the remedy."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urlopen(Request(f"{url}/ui/state", headers=headers), timeout=TIMEOUT) as reply:
            state = parse_json(reply.read())
    except HTTPError as error:
        remedy = "give a key with --api-key" if error.code == 401 else "is this a deltaserve router?"
        raise Unreachable(f"{url}: status {error.code}; {remedy}") from error
    except (URLError, OSError, ValueError, HTTPException) as error:
        reason = " ".join(str(getattr(error, "reason", error)).split())
        raise Unreachable(f"{url}: {reason}; name the router's address with --endpoint") from error
    if not isinstance(state, dict) or not state.keys() >= FIELDS:
        raise Unreachable(f"{url}: what it says is not a router's state; is this a deltaserve router?")
    return state


def draw(state: dict[str, Any] | None, problem: str, stream: TextIO, width: int = 0) -> None:
    """Write one picture to a stream: of the state, or of the problem when there is none."""
    console = Console(file=stream, width=width or None)
    console.print(
        screen(state) if state is not None else Panel(Text(problem, style="red"), title="deltaserve")
    )


def screen(state: dict[str, Any]) -> RenderableType:
    """Everything, from top to bottom."""
    return Group(
        _head(state), _pools(state), _handoffs(state), _choices(state), _requests(state), _faults(state)
    )


def _head(state: dict[str, Any]) -> RenderableType:
    asked, latency = state["requests"], state["latency"]
    lines = [
        Text.assemble(
            ("deltaserve ", "bold"),
            _worded(state["status"]),
            f"  {state['model']}, placement {state['placement']}, policy {state['policy']}, up {_ago(state['uptime'])}",
        ),
        Text(
            f"in flight {asked['in_flight']}  queued {asked['queued']}  {asked['tokens_per_second']:.0f} tokens/s  "
            f"{asked['requests_per_second']:.1f} requests/s  answered {asked['ended']['finished']}  "
            f"errors {asked['ended']['error']}  resumed {asked['resumed']}"
        ),
        Text("   ".join(_latency(name, latency[name]) for name in ("ttft", "tpot"))),
    ]
    lines += [Text(text, style="yellow") for text in state["missing"]]
    return Panel(Group(*lines), padding=(0, 1))


def _latency(name: str, found: dict[str, Any]) -> str:
    return f"{name.upper()} p50 {_seconds(found['p50'])} p90 {_seconds(found['p90'])} p99 {_seconds(found['p99'])}"


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        collapse_padding=True,
        expand=True,
    )
    for name in columns:
        right = name.startswith(">")
        table.add_column(
            name.lstrip(">"),
            justify="right" if right else "left",
            header_style="dim",
            no_wrap=True,
            ratio=GIVE_WAY.get(name),
        )
    return table


def _pools(state: dict[str, Any]) -> Table:
    pools = [(role, state["pools"][role]) for role in ("prefill", "decode")]
    broken = any(worker["error"] for _, members in pools for worker in members)
    table = _table(
        "Pools",
        "role",
        "worker",
        "state",
        ">run",
        ">wait",
        ">queued",
        ">outst.",
        ">cache",
        ">state",
        *(["error"] if broken else []),
    )
    for role, members in pools:
        for worker in members:
            table.add_row(
                role,
                worker["id"],
                _worded(worker["state"]),
                f"{worker['running']}/{worker['slots'] or '?'}",
                str(worker["waiting"]),
                str(worker["queued_tokens"]),
                str(worker["outstanding_tokens"]),
                f"{100 * worker['kv_usage']:.1f} %",
                _bytes(worker["state_bytes"]),
                *([Text(worker["error"], style="red")] if broken else []),
            )
    return table


def _handoffs(state: dict[str, Any]) -> Table:
    table = _table(
        "Boundaries, rank by rank",
        "stage",
        "worker",
        "request",
        ">tokens",
        "state",
        "ranks",
        ">bytes",
        ">time",
    )
    for one in state["boundaries"][:HANDOFFS]:
        ranks = Text(" ").join(
            Text(f"{rank['rank']}:{rank['failure'] or rank['state']}", style=_COLOURS.get(rank["state"], ""))
            for rank in one["ranks"]
        )
        failed = one["state"] == "failed"
        table.add_row(
            one["stage"],
            one["worker"],
            one["request"],
            str(one["tokens"]),
            Text(one["outcome"], style="red") if failed else _worded(one["state"]),
            ranks,
            _bytes(one["bytes"]),
            _seconds(one["took"] if one["outcome"] else one["age"]),
        )
    return table


def _choices(state: dict[str, Any]) -> Text:
    total = sum(state["choices"].values()) or 1
    parts = [f"{_way(name)} {100 * number / total:.0f} %" for name, number in state["choices"].items()]
    return Text.assemble(("Choices ", "bold"), ", ".join(parts) or "none yet")


def _way(name: str) -> str:
    return "handed over" if name == "handover" else f"here ({name.replace('_', ' ')})"


def _requests(state: dict[str, Any]) -> Table:
    table = _table("Requests", "request", ">prompt", ">answer", "choice", "why", ">TTFT", ">TPOT", "status")
    for one in state["recent"][:REQUESTS]:
        known = one["choice"] in ("handover", "local")
        choice = (
            _way("handover" if one["choice"] == "handover" else one["reason"]) if known else one["choice"]
        )
        table.add_row(
            one["id"],
            str(one["prompt"]),
            str(one["output"]),
            choice,
            Text(one["why"], style="dim", overflow="ellipsis"),
            _seconds(one["ttft"]),
            _seconds(one["tpot"]),
            Text.assemble(_worded(one["status"]), f" {one['failure']}" if one["failure"] else ""),
        )
    return table


def _faults(state: dict[str, Any]) -> Table:
    table = _table("Faults", ">ago", "level", "what")
    for fault in state["faults"][:FAULTS]:
        words = fault["text"] if fault["count"] == 1 else f"{fault['text']} ({fault['count']}x)"
        table.add_row(
            _ago(state["time"] - fault["time"]), _worded(fault["level"]), Text(words, overflow="ellipsis")
        )
    return table


def _worded(word: str) -> Text:
    return Text(word, style=_COLOURS.get(word, ""))


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


def _ago(value: float) -> str:
    return (
        f"{value:.0f} s"
        if value < 90
        else f"{value / 60:.0f} min"
        if value < 5400
        else f"{value / 3600:.0f} h"
    )


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
