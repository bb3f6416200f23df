# SPDX-License-Identifier: Apache-2.0
"""Configuration of `deltaserve plan`; see deltaserve/config.py for how fields become flags."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, Field, model_validator

from deltaserve.config import STRICT


class PlanConfig(BaseModel):
    """The planner: how many workers each role needs, as metrics for an autoscaler or through Ray."""

    model_config = STRICT

    routers: list[str] = Field(
        ["http://127.0.0.1:8000"],
        description="URLs of the cluster's routers; dns+http://NAME:PORT: every address that the name has",
    )
    profile: Path = Field(
        Path("deploy/planner/profiles/demo-cpu.json"),
        description="JSON file of what a worker can do; python -m benchmarks.scaling.calibrate writes it",
    )
    ttft: float = Field(4.0, gt=0, description="promised seconds to the first token")
    tpot: float = Field(0.1, gt=0, description="promised seconds a token after the first")
    target: float = Field(0.99, gt=0, lt=1, description="share of requests that shall meet both")
    interval: float = Field(5.0, gt=0, description="seconds between two looks")
    lowest: int = Field(1, ge=1, description="workers of a role at least")
    highest: int = Field(16, ge=1, description="workers of a role at most")
    host: str = Field("127.0.0.1", description="address that serves the planner's metrics")
    port: int = Field(9105, ge=0, le=65535, description="port of the planner's metrics; 0: any free one")
    ray: str = Field("", description="name of the cluster on Ray to scale; empty: metrics only")
    ray_address: str = Field("auto", description="Ray's address")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.lowest > self.highest:
            raise ValueError(f"lowest {self.lowest} is more than highest {self.highest}; lower it")
        if not self.routers:
            raise ValueError("routers: none named; give at least one URL")
        return self
