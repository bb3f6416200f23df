# SPDX-License-Identifier: Apache-2.0
"""Calls to a running cluster, and a look into its ledger and its store."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from deltaserve.config import EtcdConfig
from deltaserve.up import Cluster
from statestore.boundary import BoundaryRecord
from statestore.etcd_ledger import EtcdLedger

TIMEOUT = 120.0


def call(
    url: str, body: object = None, raw: bytes | None = None, timeout: float = TIMEOUT
) -> tuple[int, dict[str, Any]]:
    """Status and JSON document (text under "text" where it is none) of a GET, or of a POST with `body` or `raw`."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            status, text = reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    try:
        document = json.loads(text)
    except ValueError:
        document = {"text": text}
    return status, document if isinstance(document, dict) else {"list": document}


def complete(
    cluster: Cluster, prompt: list[int], placement: str = "handover", **fields: Any
) -> dict[str, Any]:
    """One greedy completion of token ids: `tokens`, `logprobs`, `id`, `trace`. The status must be 200."""
    body: dict[str, Any] = {
        "model": cluster.served_model_name,
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
        "kv_transfer_params": {"placement": placement},
        **fields,
    }
    status, document = call(cluster.endpoint + "/v1/completions", body)
    assert status == 200, document
    choice = document["choices"][0]
    assert choice["finish_reason"] in ("length", "stop"), document
    return {
        "tokens": choice["token_ids"],
        "logprobs": choice["logprobs"]["token_logprobs"],
        "id": document["id"],
        "usage": document["usage"],
        "trace": trace(cluster, document["id"]),
    }


def trace(cluster: Cluster, request_id: str) -> dict[str, Any]:
    """What the router knows of a request."""
    status, document = call(f"{cluster.endpoint}/deltaserve/requests/{request_id}")
    assert status == 200, document
    return document


def metric(cluster: Cluster, sample: str) -> float:
    """Value of one sample of the router's /metrics, e.g. `name_total{reason="policy"}`; 0 where there is none."""
    _, document = call(cluster.endpoint + "/metrics")
    return sample_of(document["text"], sample)


def records(cluster: Cluster) -> list[BoundaryRecord]:
    """What the ledger holds now of requests: every record that is no committed checkpoint."""
    return [r for r in _ledger(cluster) if not (r.reusable and r.state == "committed")]


def checkpoints(cluster: Cluster) -> list[BoundaryRecord]:
    """Committed checkpoints, oldest first."""
    return [r for r in _ledger(cluster) if r.reusable and r.state == "committed"]


def _ledger(cluster: Cluster) -> list[BoundaryRecord]:
    async def read() -> list[BoundaryRecord]:
        ledger = EtcdLedger(EtcdConfig(endpoints=[cluster.etcd_endpoint]))
        try:
            return list(await ledger.list())
        finally:
            await ledger.close()

    return asyncio.run(read())


def stored_objects(cluster: Cluster) -> int:
    """Objects in the store, by its master's own count, beyond those of committed checkpoints."""
    kept = sum(len(record.objects()) for record in checkpoints(cluster))
    arguments = Path(f"/proc/{cluster.pids['master']}/cmdline").read_text().split("\0")
    port = next(a.partition("=")[2] for a in arguments if a.startswith("--metrics_port="))
    _, document = call(f"http://127.0.0.1:{port}/metrics", timeout=10)
    assert re.search(r"^master_key_count ", document["text"], re.MULTILINE), document["text"][:2000]
    return int(sample_of(document["text"], "master_key_count")) - kept


def sample_of(text: str, sample: str) -> float:
    """Value of one sample of a text that a Prometheus would scrape; 0 where there is none."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith((f"{sample} ", f"{sample}{{"))
    )
