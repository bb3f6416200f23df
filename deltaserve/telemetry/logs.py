# SPDX-License-Identifier: Apache-2.0
"""Logs: one record a line on stderr, as text or as JSON; the request's id is in every JSON line that is about one.

Where the id comes from, first hit wins:

    1  the record's own `extra={"request_id": ...}`
    2  `about(request_id)`, inside of which the line was written, also by tasks that began there
    3  its first argument, when its words begin with "request %s" (that is how a line about a request begins here)

It is the id that the client got (`id` of the OpenAI response) in all processes, so one search finds all of them. The
gateway's own lines come before there is a response; they carry the X-Request-Id that the id is made from.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from deltaserve.config import LogConfig

REQUEST_ID: ContextVar[str] = ContextVar("deltaserve_request_id", default="")
"""The request that the running code is about; empty: none."""
NAME_VARIABLE = "DELTASERVE_LOG_NAME"
"""Environment variable that gives the processes of a worker's ranks its name."""
VLLM_CONFIG = Path(__file__).with_name("vllm_logging.json")
"""What vLLM's own loggers, and the processes of the ranks, are configured with under format json."""

_PROMPT_INDEX = re.compile(r"^(cmpl-.+)-\d+$")


def client_id(external_id: str) -> str:
    """The `id` of the OpenAI response for vLLM's external request id (completions append the prompt's index)."""
    match = _PROMPT_INDEX.match(external_id)
    return match.group(1) if match else external_id


@contextlib.contextmanager
def about(request_id: str) -> Iterator[None]:
    """What is logged inside is about this request."""
    token = REQUEST_ID.set(request_id)
    try:
        yield
    finally:
        REQUEST_ID.reset(token)


def request_of(record: logging.LogRecord) -> str:
    """The id of the request that a record is about; empty: about none. See the module's description."""
    given = getattr(record, "request_id", "") or REQUEST_ID.get()
    if not given and isinstance(record.msg, str) and record.msg.startswith("request %s") and record.args:
        given = record.args[0] if isinstance(record.args, tuple) else ""
    return str(given)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, process, pid, logger, message, and request_id and error if any."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process or os.environ.get(NAME_VARIABLE, "")

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := request_of(record):
            line["request_id"] = request_id
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(name: str, config: LogConfig | None = None) -> None:
    """Log to stderr: as text (time, level, process, logger, message) or as JSON. `name`: of this process."""
    config = config or LogConfig()
    handler = logging.StreamHandler(sys.stderr)
    if config.format == "json":
        handler.setFormatter(JsonFormatter(name))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {name} %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    for noisy in ("vllm", "grpc", "asyncio", "opentelemetry", "httpx", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def hand_to_vllm(name: str) -> None:
    """Let vLLM, which configures logging anew, and the processes of the ranks that it starts, write JSON too.

    For workers; before the first import of vLLM. An operator's own VLLM_LOGGING_CONFIG_PATH wins.
    """
    os.environ[NAME_VARIABLE] = name
    os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(VLLM_CONFIG))
