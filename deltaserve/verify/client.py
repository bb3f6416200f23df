# SPDX-License-Identifier: Apache-2.0
"""The endpoint as `verify` uses it: completions of token ids with log-probs, and the router's trace of each."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deltaserve.documents import parse_json
from deltaserve.verify.compare import Answer
from deltaserve.verify.prompts import Case, Group

TIMEOUT = 300.0
"""Seconds one request may take."""


class EndpointError(Exception):
    """The endpoint cannot be reached or did not answer as an OpenAI endpoint of vLLM does; the message says where."""


class Endpoint:
    """One OpenAI endpoint. Safe for use from several threads."""

    def __init__(self, url: str, timeout: float = TIMEOUT) -> None:
        """`url` without a path (a trailing /v1 is taken off). Raises EndpointError when it does not name its model."""
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise EndpointError(f"endpoint: {url!r} is no URL; give one as http://127.0.0.1:8000")
        self._timeout = timeout
        models = self._call("/v1/models").get("data") or []
        if not models:
            raise EndpointError(f"endpoint {self.url}: GET /v1/models names no model")
        self.model = str(models[0]["id"])

    def complete(self, case: Case, placement: str, salt: str = "") -> tuple[Answer, dict[str, Any]]:
        """One answer and its trace. A `salt` of its own keeps a request out of every prefix cache.

        Raises EndpointError, with the server's own words where it refused.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(case.prompt.tokens),
            "max_tokens": case.max_tokens,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
            **sampling_fields(case),
        }
        if placement != "auto":
            body["kv_transfer_params"] = {"placement": placement}
        if salt:
            body["cache_salt"] = salt
        reply = self._call("/v1/completions", body)
        return self._answer(case, reply), self.trace(str(reply.get("id", "")))

    def complete_group(self, group: Group, placement: str, salt: str) -> list[tuple[Answer, dict[str, Any]]]:
        """The group's cases at once, in their order. Raises EndpointError of the first that failed."""
        if len(group.cases) == 1:
            return [self.complete(group.cases[0], placement, salt)]
        with ThreadPoolExecutor(len(group.cases)) as pool:
            work = [
                pool.submit(self.complete, case, placement, f"{salt}-{index}" if salt else "")
                for index, case in enumerate(group.cases)
            ]
            return [each.result() for each in work]

    def trace(self, request_id: str) -> dict[str, Any]:
        """What happened to a request; empty where the endpoint keeps no traces."""
        try:
            return self._call(f"/deltaserve/requests/{request_id}")
        except _NotFound:
            return {}

    def health(self) -> dict[str, Any]:
        """The router's GET /health, whatever its status; empty where there is none."""
        try:
            return self._call("/health", accept=(503,))
        except _NotFound:
            return {}

    def _answer(self, case: Case, reply: dict[str, Any]) -> Answer:
        try:
            choice = reply["choices"][0]
            tokens = choice["token_ids"]
            logprobs = choice["logprobs"]["token_logprobs"]
        except (KeyError, IndexError, TypeError) as error:
            raise EndpointError(
                f"endpoint {self.url}: the answer to {case.name} lacks choices with token_ids and logprobs "
                f"(return_token_ids, logprobs): {str(reply)[:300]}"
            ) from error
        if choice.get("finish_reason") not in ("length", "stop") or tokens is None:
            raise EndpointError(
                f"endpoint {self.url}: the answer to {case.name} ended with {choice.get('finish_reason')!r}"
            )
        return Answer(tuple(tokens), tuple(float(x) for x in logprobs))

    def _call(
        self, path: str, body: dict[str, Any] | None = None, accept: tuple[int, ...] = ()
    ) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=self._timeout) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            text = error.read()
            if error.code == 404 and body is None:
                raise _NotFound(f"endpoint {self.url}: there is no {path}") from error
            if error.code not in accept:
                raise EndpointError(
                    f"endpoint {self.url}: {path} answered {error.code}: {text[:500].decode(errors='replace')}"
                ) from error
        except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: it is no URL
            reason = getattr(error, "reason", error)
            raise EndpointError(
                f"endpoint {self.url}: {path} failed ({reason}); is the cluster running?"
            ) from error
        try:
            document = parse_json(text) if text else {}
        except ValueError as error:
            raise EndpointError(f"endpoint {self.url}: {path} did not answer with JSON") from error
        return document if isinstance(document, dict) else {}


class _NotFound(EndpointError):
    """404 on a GET."""


def sampling_fields(case: Case) -> dict[str, Any]:
    """Every sampling parameter by name, so that no default of a server or of a model's own file has a say."""
    fields: dict[str, Any] = {
        "temperature": case.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    if case.temperature:
        fields["seed"] = case.seed
    return fields
