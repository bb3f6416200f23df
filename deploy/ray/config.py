# SPDX-License-Identifier: Apache-2.0
"""What a cluster on Ray is made of: the fields of `deltaserve up`, and where its actors go."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from deltaserve.config import ClusterConfig, Role

ROLES: tuple[Role, ...] = ("prefill", "decode")
CONTROL = "control"
"""etcd, the Mooncake master and the router, in one actor."""


class RayConfig(ClusterConfig):
    """A cluster of Ray actors. The inherited fields are those of `deltaserve up`."""

    name: str = Field(
        "default", pattern=r"^[a-z0-9-]+$", description="name of this cluster among those on one Ray"
    )
    address: str = Field("auto", description="Ray's address; auto: the Ray that runs on this machine")
    host: str = Field("", description="address the endpoint binds; empty: that of the control actor's node")
    prefill_cpus: float = Field(1.0, ge=0, description="logical CPUs that a prefill actor takes")
    decode_cpus: float = Field(1.0, ge=0, description="logical CPUs that a decode actor takes")
    highest: int = Field(16, ge=1, description="replicas of a role at most")
    drain_seconds: float = Field(
        25.0, gt=0, description="seconds that a worker has to finish what it holds when it is scaled away"
    )
    log_dir: Path = Field(
        Path("/tmp/deltaserve-ray"), description="folder on each node for the processes' log files"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for role in ROLES:
            if self.replicas(role) > self.highest:
                raise ValueError(
                    f"{role} {self.replicas(role)}: more than highest {self.highest}; raise --highest"
                )
        if self.prefill < 1:
            raise ValueError("prefill 0: a Ray cluster has both roles; give at least 1")
        return self

    @property
    def namespace(self) -> str:
        """Ray's namespace, which holds the names of this cluster's actors."""
        return f"deltaserve-{self.name}"

    def replicas(self, role: Role) -> int:
        """Replicas at the start."""
        return self.prefill if role == "prefill" else self.decode

    def bundle(self, kind: Role | Literal["control"]) -> dict[str, float]:
        """What one actor takes of its node: its role's own resource, logical CPUs, and the GPUs of its ranks.

        A node that shall run a role is started with `deltaserve_<role>` of as many replicas as it has room for.
        """
        taken: dict[str, float] = {resource(kind): 1.0}
        if kind == CONTROL:
            return taken
        prefill = kind == "prefill"
        cpus = self.prefill_cpus if prefill else self.decode_cpus
        if cpus:
            taken["CPU"] = cpus
        if self.device == "cuda":
            taken["GPU"] = float(self.prefill_tp if prefill else self.decode_tp)
        return taken


def resource(kind: str) -> str:
    """Ray's custom resource of a role."""
    return f"deltaserve_{kind}"
