# SPDX-License-Identifier: Apache-2.0
"""`python -m deploy.ray up|scale|status|down`: a cluster on the Ray that is running. docs/ray.md.

`up` takes the fields of RayConfig as flags, starts the cluster and waits until it is ready; the cluster stays when the
command ends. Exit codes are those of `deltaserve`: 0 done, 1 failed (one line `error: …` says why), 2 wrong options.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from deltaserve.cli.options import OptionError, add_options, load
from deltaserve.up.errors import ClusterError
from deploy.ray.cluster import RayCluster
from deploy.ray.config import ROLES, RayConfig

COMMAND = "ray"


def parser() -> argparse.ArgumentParser:
    """The four commands."""
    made = argparse.ArgumentParser(prog="python -m deploy.ray", description="A cluster of Ray actors.")
    commands = made.add_subparsers(dest="command", required=True)
    add_options(commands.add_parser("up", help="start a cluster, wait until it serves"), RayConfig, COMMAND)
    others = {
        "scale": "set the workers of a role",
        "status": "what runs, and where",
        "down": "end a cluster; Ray stays",
    }
    for name, summary in others.items():
        sub = commands.add_parser(name, help=summary)
        sub.add_argument("--name", default="default", help="name of the cluster")
        sub.add_argument("--address", default="auto", help="Ray's address")
        if name == "scale":
            sub.add_argument("role", choices=ROLES)
            sub.add_argument("replicas", type=int)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    namespace = parser().parse_args(argv)
    try:
        if namespace.command == "up":
            return _up(load(RayConfig, COMMAND, namespace, os.environ))
        cluster = RayCluster.attach(namespace.name, namespace.address)
        if namespace.command == "scale":
            cluster.scale(namespace.role, namespace.replicas)
        elif namespace.command == "status":
            print(f"{cluster.endpoint}/v1\n{cluster.describe()}")
        else:
            cluster.stop()
    except OptionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (ClusterError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _up(config: RayConfig) -> int:
    cluster = RayCluster.start(config)
    try:
        cluster.wait_ready(config.start_timeout)
    except ClusterError:
        cluster.stop()
        raise
    print(f"ready: {cluster.endpoint}/v1")
    return 0


if __name__ == "__main__":
    sys.exit(main())
