# SPDX-License-Identifier: Apache-2.0
"""Puts the state store into a worker: the parts that deltaserve.engine.worker asks a role's package for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from deltaserve.config import WorkerConfig
from deltaserve.engine.role import Job, Role
from deltaserve.engine.worker import Parts
from deltaserve.etcd import EtcdMembership
from statestore.geometry import Geometry

Build = Callable[[str, Geometry, Callable[[Job], None]], Awaitable[Role]]
"""`await build(worker_id, geometry, forget)` makes the role once the engine runs."""


def parts(build: Build) -> Parts:
    """The parts of a worker whose role `build` makes."""
    return Parts(
        connector_events=_listen,
        geometry=_geometry,
        segments=_segments,
        between_steps=_between_steps,
        membership=_membership,
        build=build,
    )


def _listen(worker_id: str, listener: Callable[..., None] | None) -> None:
    # Imported late: the connector imports vLLM, which reads the environment that `run` sets first.
    from statestore.connector.events import listen, watch

    listen(worker_id, listener)
    watch(worker_id, listener)


def _geometry(vllm_config: Any, kv_cache_config: Any, model_digest: str) -> Geometry:
    from statestore.connector.describe import geometry_of

    return geometry_of(vllm_config, kv_cache_config, model_digest)


def _segments(core: Any) -> list[str]:
    from statestore.connector.worker_half import rank_segment

    return [str(name) for name in core.collective_rpc(rank_segment)]


def _between_steps(core: Any) -> None:
    from statestore.connector.at_once import tell

    tell(core)


def _membership(config: WorkerConfig) -> EtcdMembership:
    return EtcdMembership(config.etcd)
