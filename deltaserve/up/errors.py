# SPDX-License-Identifier: Apache-2.0
"""What can keep a cluster from starting."""

from __future__ import annotations


class ClusterError(Exception):
    """The cluster cannot start or has failed. The message names what and the remedy.

    `log_tail` holds the last lines of the failing process's log, oldest first; empty where there is none.
    """

    def __init__(self, message: str, log_tail: list[str] | None = None) -> None:
        super().__init__(message)
        self.log_tail = log_tail or []
