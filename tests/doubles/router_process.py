# SPDX-License-Identifier: Apache-2.0
"""A router process over given workers; everything is real but the register.

`python -m tests.doubles.router_process CONFIGURATION MEMBERS`, a JSON object and a JSON list.
"""

from __future__ import annotations

import json
import sys

from deltaserve.config import RouterConfig
from deltaserve.membership import Member
from router.main import run
from tests.doubles.static_membership import StaticMembership


def main() -> int:
    """Run the router until a signal."""
    config = RouterConfig.model_validate(json.loads(sys.argv[1]))
    members = [Member(**fields) for fields in json.loads(sys.argv[2])]
    return run(config, lambda: StaticMembership(members))


if __name__ == "__main__":
    sys.exit(main())
