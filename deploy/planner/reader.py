# SPDX-License-Identifier: Apache-2.0
"""The cluster's load, out of its routers' `/health` and `/metrics`.

Routers know everything that the planner needs: what each worker was given and has not done, what workers report of
their caches once a second, and what clients have seen of time. With several routers their shares are added; what a
worker reports of itself is taken from whichever router says most. A `Reader` turns counters into an interval's counts,
so that its first look gives nothing.

A router is named by its URL, or several of them by `dns+http://NAME:PORT`: every address that the name has at a look,
which under Kubernetes is every ready router behind a Service without an address of its own.
"""

from __future__ import annotations

import json
import math
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from deltaserve.addresses import join
from deltaserve.config import Role
from deploy.planner.load import DecodeLoad, Load, PrefillLoad

TIMEOUT = 5.0
"""Seconds that a router has for an answer."""
BY_NAME = "dns+http://"


class ReadFailed(Exception):
    """A router did not answer, or not as it should; the message names it. Nothing is planned on half a picture."""


@dataclass
class Worker:
    """One worker, as the routers see it together."""

    role: str
    ready: bool = False
    requests: int = 0
    outstanding_tokens: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


@dataclass
class Totals:
    """Counters since the routers began, and what is there now."""

    routers: frozenset[str] = frozenset()
    """Whose they are."""
    ended: float = 0.0
    in_flight: float = 0.0
    prompt_tokens: float = 0.0
    ttft_count: float = 0.0
    ttft_in_time: float = 0.0
    tpot_count: float = 0.0
    tpot_sum: float = 0.0
    workers: dict[str, Worker] = field(default_factory=dict)

    def pool(self, role: Role) -> list[Worker]:
        """Workers of a role."""
        return [worker for worker in self.workers.values() if worker.role == role]

    def sum(self, role: Role, what: str) -> int:
        """A field of all workers of a role."""
        return sum(int(getattr(worker, what)) for worker in self.pool(role))


def fetch(url: str) -> str:
    """The text of a GET. Raises ReadFailed; an answer of 503 to `/health` is an answer."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as reply:
            return str(reply.read().decode())
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return error.read().decode()
        raise ReadFailed(f"{url}: HTTP {error.code}") from error
    except (OSError, ValueError) as error:
        raise ReadFailed(f"{url}: {error}") from error


def resolve(host: str, port: int) -> list[str]:
    """Addresses of a name, each once, in order. Raises OSError when it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


class Reader:
    """Looks at all routers of one cluster."""

    def __init__(
        self,
        routers: Sequence[str],
        ttft: float,
        get: Callable[[str], str] = fetch,
        look_up: Callable[[str, int], list[str]] = resolve,
    ) -> None:
        """`routers`: their URLs; `ttft`: the promised seconds to the first token, which says what is late.

        Raises ValueError for a URL that names no port where one is needed.
        """
        self._routers = [router.rstrip("/") for router in routers]
        for router in self._routers:
            if router.startswith(BY_NAME) and _name(router) is None:
                raise ValueError(f"routers {router}: not {BY_NAME}NAME:PORT; give both")
        self._look_up = look_up
        self._ttft = ttft
        self._get = get
        self._last: tuple[float, Totals] | None = None

    def read(self, now: float, starting: dict[Role, int]) -> Load | None:
        """The load since the look before; None for the first look, and when a router has come, gone or begun anew.

        `now`: seconds of a clock that does not go back; `starting`: workers asked for that do not serve yet.
        Raises ReadFailed when a router does not answer.
        """
        totals = self._totals(self._present())
        before, self._last = self._last, (now, totals)
        if before is None:
            return None
        then, old = before
        passed = {
            name: getattr(totals, name) - getattr(old, name)
            for name in ("ended", "prompt_tokens", "ttft_count", "ttft_in_time", "tpot_count", "tpot_sum")
        }
        if min(passed.values()) < 0 or totals.routers != old.routers:
            return None
        return _load(now, now - then, totals, old, passed, starting)

    def _totals(self, routers: list[str]) -> Totals:
        totals = Totals(frozenset(routers))
        for router in routers:
            self._add_health(totals, router)
            self._add_metrics(totals, router)
        return totals

    def _present(self) -> list[str]:
        """URLs of the routers that there are now."""
        urls: list[str] = []
        for router in self._routers:
            named = _name(router) if router.startswith(BY_NAME) else None
            if named is None:
                urls.append(router)
                continue
            try:
                urls += [f"http://{join(address, named[1])}" for address in self._look_up(*named)]
            except OSError as error:
                raise ReadFailed(f"{router}: the name has no address ({error})") from error
        return urls

    def _add_health(self, totals: Totals, router: str) -> None:
        try:
            roles = json.loads(self._get(f"{router}/health"))["roles"]
            for role, entry in roles.items():
                for seen in entry["workers"]:
                    _add_worker(totals.workers.setdefault(seen["id"], Worker(role)), seen)
        except (KeyError, TypeError, ValueError) as error:
            raise ReadFailed(f"{router}/health: not a router's answer ({error!r})") from error

    def _add_metrics(self, totals: Totals, router: str) -> None:
        found: dict[str, float] = {}
        limits: dict[float, float] = {}
        try:
            families = list(text_string_to_metric_families(self._get(f"{router}/metrics")))
        except ValueError as error:
            raise ReadFailed(f"{router}/metrics: not Prometheus text ({error})") from error
        for family in families:
            for sample in family.samples:
                if sample.name == "deltaserve_router_ttft_seconds_bucket":
                    limit = float(sample.labels["le"])
                    limits[limit] = limits.get(limit, 0.0) + sample.value
                elif sample.name.startswith("deltaserve_router_"):
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
        if "deltaserve_router_in_flight" not in found:
            raise ReadFailed(f"{router}/metrics: has no deltaserve_router_in_flight; is it a router?")
        totals.ended += found.get("deltaserve_router_requests_total", 0.0)
        totals.in_flight += found["deltaserve_router_in_flight"]
        totals.prompt_tokens += found.get("deltaserve_router_prompt_tokens_total", 0.0)
        totals.ttft_count += found.get("deltaserve_router_ttft_seconds_count", 0.0)
        totals.ttft_in_time += _within(limits, self._ttft)
        totals.tpot_count += found.get("deltaserve_router_tpot_seconds_count", 0.0)
        totals.tpot_sum += found.get("deltaserve_router_tpot_seconds_sum", 0.0)


def _name(router: str) -> tuple[str, int] | None:
    """(name, port) of `dns+http://NAME:PORT`; None when one of them is missing."""
    parts = urlsplit(router.removeprefix("dns+"))
    try:
        return (parts.hostname, parts.port) if parts.hostname and parts.port else None
    except ValueError:
        return None


def _add_worker(worker: Worker, seen: dict[str, Any]) -> None:
    worker.ready = worker.ready or seen["state"] == "ready"
    worker.requests += int(seen["requests"])
    worker.outstanding_tokens += int(seen["outstanding_tokens"])
    worker.waiting = max(worker.waiting, int(seen["waiting"]))
    worker.kv_usage = max(worker.kv_usage, float(seen["kv_usage"]))


def _within(limits: dict[float, float], seconds: float) -> float:
    """Observations of at most so many seconds, from cumulative buckets; within a bucket taken as even."""
    below, under = 0.0, 0.0
    for limit in sorted(limits):
        if limit >= seconds:
            if math.isinf(limit) or limit == below:
                return limits[limit] if limit == seconds else under
            return under + (limits[limit] - under) * (seconds - below) / (limit - below)
        below, under = limit, limits[limit]
    return under


def _load(
    now: float,
    interval: float,
    totals: Totals,
    old: Totals,
    passed: dict[str, float],
    starting: dict[Role, int],
) -> Load:
    queued = totals.sum("prefill", "outstanding_tokens")
    prompts = passed["prompt_tokens"] + queued - old.sum("prefill", "outstanding_tokens")
    held, held_before = totals.sum("decode", "requests"), old.sum("decode", "requests")
    decode = [worker for worker in totals.pool("decode") if worker.ready]
    return Load(
        now=now,
        interval=interval,
        prefill=PrefillLoad(
            ready=sum(worker.ready for worker in totals.pool("prefill")),
            starting=starting.get("prefill", 0),
            queued_requests=totals.sum("prefill", "requests"),
            queued_tokens=queued,
            arrived_requests=max(0.0, passed["ended"] + totals.in_flight - old.in_flight),
            arrived_tokens=max(0.0, prompts),
            ttft_late=1 - passed["ttft_in_time"] / passed["ttft_count"] if passed["ttft_count"] else 0.0,
        ),
        decode=DecodeLoad(
            ready=len(decode),
            starting=starting.get("decode", 0),
            requests=held,
            waiting=sum(worker.waiting for worker in decode),
            kv_usage=sum(worker.kv_usage for worker in decode) / max(1, len(decode)),
            arrived_requests=max(0.0, passed["ended"] + held - held_before),
            tpot=passed["tpot_sum"] / passed["tpot_count"] if passed["tpot_count"] else None,
        ),
    )
