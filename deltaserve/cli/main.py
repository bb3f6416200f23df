# SPDX-License-Identifier: Apache-2.0
"""The table of commands. A command is a configuration model and the name of the function that takes it.

Functions are named, not imported: a role loads its own packages when it runs, so `deltaserve --help` is quick, and the
packages of the roles may import this one without a circle.

Exit codes: 0 done, 1 the command failed (one line `error: …` on stderr says why), 2 the options are wrong,
130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from pydantic import BaseModel

from deltaserve import __version__
from deltaserve.cli.options import OptionError, add_options, load
from deltaserve.config import (
    BoundariesConfig,
    ClusterConfig,
    DoctorConfig,
    DrainConfig,
    RouterConfig,
    TopConfig,
    VerifyConfig,
    WorkerConfig,
)
from deltaserve.plan_config import PlanConfig


@dataclass(frozen=True)
class Command:
    """One `deltaserve <name>`."""

    name: str
    summary: str
    model: type[BaseModel]
    target: str
    """`package.module:function`; the function takes the configuration and returns the exit code."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Fields that the command decides, so they are no flags."""


COMMANDS = (
    Command("up", "start a whole cluster on this machine", ClusterConfig, "deltaserve.up.main:run"),
    Command("router", "run the router: the OpenAI endpoint", RouterConfig, "router.main:run"),
    Command("prefill", "run a prefill worker", WorkerConfig, "prefill_worker.main:run", {"role": "prefill"}),
    Command("decode", "run a decode worker", WorkerConfig, "decode_worker.main:run", {"role": "decode"}),
    Command("verify", "compare a cluster with one engine", VerifyConfig, "deltaserve.verify.main:run"),
    Command(
        "doctor", "report what this machine can run, and why", DoctorConfig, "deltaserve.doctor.main:run"
    ),
    Command("drain", "let a worker finish what it holds and leave", DrainConfig, "deltaserve.cli.drain:run"),
    Command("top", "watch a running router", TopConfig, "deltaserve.cli.top:run"),
    Command("plan", "say how many workers each role needs", PlanConfig, "deploy.planner.main:run"),
    Command("boundaries", "list what the ledger holds", BoundariesConfig, "deltaserve.cli.boundaries:run"),
)


def build_parser(commands: Sequence[Command] = COMMANDS) -> argparse.ArgumentParser:
    """The parser with a subparser for every command."""
    parser = argparse.ArgumentParser(
        prog="deltaserve",
        description="A serving cluster for hybrid Kimi models with prefill and decode apart, exact to the token.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"deltaserve {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in commands:
        sub = subparsers.add_parser(
            command.name, help=command.summary, description=command.model.__doc__, allow_abbrev=False
        )
        add_options(sub, command.model, command.name, frozenset(command.fixed))
    return parser


def main(argv: Sequence[str] | None = None, commands: Sequence[Command] = COMMANDS) -> int:
    """Run one command; returns the exit code (argparse itself exits with 2 on a flag it does not know)."""
    namespace = build_parser(commands).parse_args(argv)
    command = next(c for c in commands if c.name == namespace.command)
    try:
        names = [known.name for known in commands]
        config = load(command.model, command.name, namespace, os.environ, command.fixed, names)
    except OptionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        return _resolve(command)(config)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        traceback.print_exc()
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _resolve(command: Command) -> Callable[[BaseModel], int]:
    module, _, function = command.target.partition(":")
    return cast("Callable[[BaseModel], int]", getattr(importlib.import_module(module), function))
