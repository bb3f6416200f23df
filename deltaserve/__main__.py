# SPDX-License-Identifier: Apache-2.0
"""`python -m deltaserve` and the `deltaserve` script."""

from __future__ import annotations

import sys

from deltaserve.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
