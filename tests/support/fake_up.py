# SPDX-License-Identifier: Apache-2.0
"""`deltaserve` with roles that have no engine: run as `fake_up.py up FLAG…`."""

from __future__ import annotations

import sys
from pathlib import Path

from deltaserve.cli.main import main
from deltaserve.up import cluster

cluster.ROLE_COMMAND = (sys.executable, str(Path(__file__).with_name("fake_role.py")))
sys.exit(main())
