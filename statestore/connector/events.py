# SPDX-License-Identifier: Apache-2.0
"""From the scheduler half to the worker's service: who listens for a worker's boundary events.

The engine core, and with it the scheduler half, runs in the service's process, but vLLM constructs the half and hands
it nothing but its configuration. So the service registers a listener under the worker's id before it starts the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Listener = Callable[..., None]
"""`listener(name, key, *args)`; called on the engine thread where nothing else is said, must not block.

    "wrote"           key, LinkOutcome                 the only rank of a worker has written a final link; ahead of
                                                       "written", and from one of its I/O threads
    "written"         key, PublishOutcome              every link that went out has been reported, and none will follow
    "publish_failed"  key, reason                      no rank has written or will: the request ended before any link
    "restored"        key, tokens, list[RankReport]    every rank reported a load; tokens: restored, 0 after a failure
"""

Watcher = Callable[..., None]
"""The same for what is only to be looked at (deltaserve/telemetry/progress.py).

    "sent"            key, kind, ranks                 a job went out to so many ranks; kind: "publish" or "load"
    "reported"        key, kind, list[RankReport]      ranks have reported a job
"""

_listeners: dict[str, Listener] = {}
_watchers: dict[str, Watcher] = {}


def listen(worker_id: str, listener: Listener | None) -> None:
    """Register (or with None remove) the listener of a worker."""
    if listener is None:
        _listeners.pop(worker_id, None)
    else:
        _listeners[worker_id] = listener


def emit(worker_id: str, name: str, key: str, *args: Any) -> None:
    """Tell the listener of `worker_id`, if there is one."""
    listener = _listeners.get(worker_id)
    if listener is not None:
        listener(name, key, *args)


def watch(worker_id: str, watcher: Watcher | None) -> None:
    """Register (or with None remove) who looks on."""
    if watcher is None:
        _watchers.pop(worker_id, None)
    else:
        _watchers[worker_id] = watcher


def show(worker_id: str, name: str, key: str, *args: Any) -> None:
    """Tell who looks on at `worker_id`, if anybody does."""
    watcher = _watchers.get(worker_id)
    if watcher is not None:
        watcher(name, key, *args)
