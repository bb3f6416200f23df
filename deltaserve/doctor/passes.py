# SPDX-License-Identifier: Apache-2.0
"""What a running prefill worker says of its forward passes: counted, where the configuration only promises."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deltaserve.doctor.capabilities import ONE_PASS, Capability


@dataclass
class Prefills:
    """Prompts that were published, and the passes that they took."""

    prompts: int = 0
    passes: int = 0
    tokens: int = 0
    again: int = 0
    """Of the tokens, those that an earlier pass of the same prompt had computed."""

    def add(self, passes: int, tokens: int, again: int) -> None:
        """One more prompt."""
        self.prompts += 1
        self.passes += passes
        self.tokens += tokens
        self.again += again

    def seen(self, configured: list[Capability]) -> list[Capability]:
        """The capabilities with these counts; a token that was computed twice makes `ONE_PASS` unavailable."""
        if not self.prompts:
            return configured
        words = (
            f"{self.prompts} published prompts took {self.passes} forward passes for {self.tokens} tokens, "
            f"{self.again} of them computed again"
        )
        where = "counted: deltaserve_prefill_passes_total, deltaserve_prefill_tokens_total"
        return [
            replace(
                one,
                state="unavailable" if self.again else one.state,
                reason=f"{words}; {one.reason}",
                read_from=f"{where}; {one.read_from}",
            )
            if one.name == ONE_PASS
            else one
            for one in configured
        ]
