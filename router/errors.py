# SPDX-License-Identifier: Apache-2.0
"""Errors as OpenAI's clients expect them, and the one that ends the router at start."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any


class CannotServe(RuntimeError):
    """The router cannot start with this configuration or this vLLM; the message is for the operator."""


class Failed(Exception):
    """The router cannot start, or cannot go on; the message is for the operator."""


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The JSON body of an error; its type is the status in words, as vLLM names it: BadRequestError, NotFoundError."""
    kind = HTTPStatus(status).phrase.replace(" ", "") + "Error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
