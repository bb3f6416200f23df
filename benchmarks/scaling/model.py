# SPDX-License-Identifier: Apache-2.0
"""What a worker can do, in seconds, and what is asked of the cluster. Numbers only; the simulator does the rest.

    prefill of n tokens      prefill_fixed + n · prefill_token                       one prompt after another
    handoff of n tokens      handoff_fixed + n · handoff_token                       publish, commit, load
    decode step, b running   step_fixed + b · step_sequence + context · step_context context: tokens of all b

A step gives every running request one token. A worker runs `slots` requests at once, and no more than fit into
`kv_tokens`; others wait. `calibrate.py` fits these numbers to a real cluster and compares.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerModel:
    """Both roles' workers. Seconds, tokens."""

    prefill_fixed: float = 0.030
    prefill_token: float = 160e-6
    handoff_fixed: float = 0.020
    handoff_token: float = 2e-6
    step_fixed: float = 0.010
    step_sequence: float = 0.001
    step_context: float = 25e-9
    slots: int = 24
    kv_tokens: int = 120_000
    start_seconds: float = 35.0
    """From the decision to the first request; 28-36 s were measured for the demonstration model."""

    def prefill_seconds(self, tokens: int) -> float:
        """One prompt's computation."""
        return self.prefill_fixed + self.prefill_token * tokens

    def handoff_seconds(self, tokens: int) -> float:
        """From the end of the computation to the restored state."""
        return self.handoff_fixed + self.handoff_token * tokens

    def step_seconds(self, running: int, context: float) -> float:
        """One decode step."""
        return self.step_fixed + self.step_sequence * running + self.step_context * context


@dataclass(frozen=True)
class Slo:
    """A request is served well when it meets both; a cluster when `target` of its requests do."""

    ttft: float = 4.0
    """Seconds to the first token."""
    tpot: float = 0.025
    """Seconds a token after the first, mean over the request."""
    target: float = 0.99


WORKER = WorkerModel()
"""The worker of the comparison: about what one GPU does for a model whose 8K prefill takes 1.3 s."""
SLO = Slo()
GPUS = 1
"""GPUs of one replica of either role."""
