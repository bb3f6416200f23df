# SPDX-License-Identifier: Apache-2.0
"""The command: the environment's checks, exit codes and the JSON file. The last tests build a real configuration."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from deltaserve.config import DoctorConfig
from deltaserve.doctor import environment
from deltaserve.doctor import main as doctor
from deltaserve.doctor.capabilities import Capability
from deltaserve.wire import worker_pb2, worker_pb2_grpc

DEMO = Path(__file__).parents[3] / "models" / "demo"


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    # Building a real configuration imports vLLM, which takes 10 s; the cluster tests below do it once in a process.
    monkeypatch.setattr(doctor, "_read_configuration", lambda config, report: None)


def test_this_machine_passes_and_the_json_says_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    assert doctor.run(DoctorConfig(model=DEMO, json_file=file)) == 0
    report = json.loads(file.read_text())
    names = [check["name"] for check in report["checks"]]
    assert {"Python", "vLLM", "etcd", "Mooncake", "device", "memory", "libibverbs", "port 8000"} <= set(names)
    assert report["model"]["kda_layers"] == 6
    out = capsys.readouterr().out
    assert "model: KimiLinearForCausalLM, 6 KDA + 2 MLA layers" in out


def test_a_missing_library_is_an_error_with_its_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "LIBRARIES", {"no-such": "libnosuch1"})
    assert doctor.run(DoctorConfig(model=DEMO)) == 1
    assert "error: libno-such: not found; apt-get install libnosuch1" in capsys.readouterr().err


def test_a_library_that_breaks_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = environment.installed
    monkeypatch.setattr(environment, "installed", lambda name: "1" if name == "torchvision" else real(name))
    checks = {check.name: check for check in environment.check_all(DoctorConfig(model=DEMO))}
    assert checks["torch extensions"].remedy.endswith("pip uninstall -y torchvision")


def test_too_little_memory_is_an_error_with_the_remedy() -> None:
    checks = {c.name: c for c in environment.check_all(DoctorConfig(model=DEMO, kv_cache_bytes=1 << 50))}
    assert checks["memory"].ok is False
    assert "lower --kv-cache-bytes" in checks["memory"].remedy


def test_a_taken_default_port_is_a_fact_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(environment, "DEFAULT_PORTS", {"router": port})
        check = environment.check_all(DoctorConfig(model=DEMO))[-1]
    assert (check.name, check.ok, check.found) == (f"port {port}", None, "taken")


def test_a_model_that_is_none_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(DoctorConfig(model=Path("/no/such"))) == 1
    assert "error: model /no/such: no such folder" in capsys.readouterr().err


class _Worker(worker_pb2_grpc.WorkerServicer):
    def Describe(self, request: Any, context: Any) -> worker_pb2.WorkerDescription:
        item = Capability("ReplaySSM", "off", "because", "there")
        return worker_pb2.WorkerDescription(
            worker_id="decode-7", role="decode", vllm_version="0.32.0", capabilities=json.dumps([vars(item)])
        )


def test_a_running_worker_is_asked() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    worker_pb2_grpc.add_WorkerServicer_to_server(_Worker(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        report = doctor.examine(DoctorConfig(model=DEMO, endpoint=f"127.0.0.1:{port}"))
    finally:
        server.stop(0)
    assert report.worker is not None
    assert report.worker["worker_id"] == "decode-7"
    assert report.capabilities == [Capability("ReplaySSM", "off", "because", "there")]
    assert not report.refusals


def test_a_worker_that_does_not_answer_is_an_error() -> None:
    report = doctor.examine(DoctorConfig(model=DEMO, endpoint="127.0.0.1:1"))
    assert any("no worker answers (UNAVAILABLE)" in refusal for refusal in report.refusals)


def _command(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deltaserve", "doctor", "--model", str(DEMO), *argv],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


@pytest.mark.cluster
def test_the_configuration_of_a_real_worker_is_read(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    settings = '{"long_prefill_token_threshold": 512, "long_prefill_token_threshold_adaptive": true}'
    done = _command("--json", str(file), "--tp", "2", "--dcp", "2", f"--extra-args={settings}")
    assert done.returncode == 0, done.stderr
    states = {item["name"]: item["state"] for item in json.loads(file.read_text())["capabilities"]}
    assert states == {
        "adaptive scheduling budget": "active",
        "internal KDA checkpoints": "unavailable",
        "one prefill pass": "unavailable",
        "zero-copy mixed batches": "unavailable",
        "deferred MXFP4 finalization": "unavailable",
        "ReplaySSM": "off",
        "hybrid state offload with pins": "active",
        "decode context parallelism (DCP)": "active",
    }


@pytest.mark.cluster
def test_a_connector_without_kda_state_is_refused_for_real() -> None:
    transfer = '{"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}'
    done = _command(f"--extra-args={transfer}")
    assert done.returncode == 1
    assert "error: kv_transfer_config: ExampleConnector does not declare SupportsHMA" in done.stderr
