# SPDX-License-Identifier: Apache-2.0
"""Run by the interpreter as `launcher.py PARENT_PID PROGRAM ARG…`, then replaced by PROGRAM.

Asks the kernel to send SIGTERM when the parent is gone (prctl PR_SET_PDEATHSIG, Linux). The wish survives the exec, so
the program dies with the supervisor even when that was killed without a chance to clean up. It uses only the standard
library, and is started without site packages: it adds about 20 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Never returns: either the program runs, or the process exits with 127 and says why."""
    parent = int(argv[0])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the wish was known
        sys.exit(127)
    try:
        os.execvp(argv[1], argv[1:])
    except OSError as error:
        print(f"error: {argv[1]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
