# SPDX-License-Identifier: Apache-2.0
"""Ids of spans and traces from the operating system's randomness.

The SDK's own come from Python's global generator, which vLLM seeds with the engine's seed: two workers then name their
spans alike, and one process's span becomes the parent of another's.
"""

from __future__ import annotations

import secrets

from opentelemetry.sdk.trace.id_generator import IdGenerator


class SystemIds(IdGenerator):
    """Never zero, which means no id."""

    def generate_span_id(self) -> int:
        """64 bits."""
        return secrets.randbelow((1 << 64) - 1) + 1

    def generate_trace_id(self) -> int:
        """128 bits."""
        return secrets.randbelow((1 << 128) - 1) + 1
