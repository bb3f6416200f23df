# SPDX-License-Identifier: Apache-2.0
"""Which workers a request goes to: what must be so, then what the policy says.

What must be so: workers of one model, workers that take requests and have not failed this one, no handover of what
cannot be handed over (`placement.local_reason`) or of what has been already.
"""

from __future__ import annotations

from router import policy
from router.cooldown import Cooldown
from router.flight import Flight
from router.placement import HANDOVER_FAILED, Facts, local_reason
from router.policy.base import lowest, works
from router.roster import Roster, Team
from router.worker_link import WorkerLink

Decision = policy.Choice[WorkerLink]


class Chooser:
    """See the module's description. Its time is that of a placement decision (`python -m benchmarks.placement`)."""

    def __init__(self, chosen: policy.Policy, roster: Roster, cooldown: Cooldown) -> None:
        self.policy = chosen
        self._roster, self._cooldown = roster, cooldown

    def choose(self, flight: Flight) -> Decision | None:
        """Where a request goes now; None while no decode worker takes it. Notes the reason in the request."""
        team = self._team(flight)
        if team is None:
            return None
        decodes = team.decodes_but(flight.failed_workers)
        facts = Facts(flight.prompt_tokens, flight.prompt_logprobs, flight.placement)
        failed = flight.local_reason if flight.local_reason in HANDOVER_FAILED else ""
        reason = failed or local_reason(facts) or ""
        able = [] if reason or flight.boundary is not None else team.prefills
        prefills = self._cooldown.allowed(able)
        forced = bool(reason) or flight.boundary is not None or flight.placement == "handover"
        flight.prompt.state_bytes = decodes[0].state_bytes_of(flight.prompt_tokens - 1)
        choice = self.policy.choose(flight.prompt, decodes, prefills, forced)
        assert choice is not None, "there is a decode worker"
        if choice.prefill is not None:
            flight.trace.why = choice.why
        elif flight.boundary is None:
            if not reason:
                reason = "prefill_failed" if able and not prefills else choice.reason
            flight.local_reason = reason
            flight.trace.why = choice.why
        return choice

    def _team(self, flight: Flight) -> Team | None:
        """The workers of one model: that of the decode worker with the least to do, where there are several."""
        teams = [team for team in self._roster.teams() if team.decodes_but(flight.failed_workers)]
        if len(teams) < 2:
            return teams[0] if teams else None
        decodes = [link for team in teams for link in team.decodes_but(flight.failed_workers)]
        best, _ = lowest(decodes, works(decodes))
        return next(team for team in teams if best in team.decodes)
