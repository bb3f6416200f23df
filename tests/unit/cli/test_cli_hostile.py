# SPDX-License-Identifier: Apache-2.0
"""Mistakes of people at the command line end with one line that names the field, never with a traceback."""

from __future__ import annotations

import http.server
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from deltaserve.cli.main import COMMANDS, main
from deltaserve.cli.options import options_of
from deltaserve.config import DoctorConfig, StoreConfig, WorkerConfig
from deltaserve.documents import parse_json
from tests.support.patience import HUNG

DEMO = Path(__file__).parents[3] / "models" / "demo"
DEEP = "[" * 100_000
TIMES = [
    (command.name, option.flag)
    for command in COMMANDS
    for option in options_of(command.model, command.name)
    if option.annotation is float and option.path[0] not in command.fixed
]


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Exit code and the one line that the command says."""
    code = main(list(argv))
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert len(said.splitlines()) == 1, said
    return code, said


def test_json_that_is_too_deep_is_refused_like_any_other_mistake() -> None:
    with pytest.raises(RecursionError):  # the control: what the library alone does
        json.loads(DEEP)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(DEEP)
    assert parse_json('{"a": [1]}') == {"a": [1]}


def test_deep_json_in_a_flag_and_in_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(DEEP)
    code, said = refusal(capsys, "up", "--config", str(file))
    assert code == 2
    assert "nested too deeply" in said
    code, said = refusal(capsys, "up", "--router-options", DEEP)
    assert code == 2
    assert "--router-options" in said


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize(("command", "flag"), TIMES)
def test_no_time_and_no_share_is_infinite(
    capsys: pytest.CaptureFixture[str], command: str, flag: str, value: str
) -> None:
    worker = ["w"] if command == "drain" else []
    code, said = refusal(capsys, command, *worker, f"{flag}={value}")
    assert code == 2
    assert said.startswith(f"error: {flag}: ")


@pytest.mark.parametrize(
    "endpoints",
    [
        "",
        "nonsense",
        ":1",
        "host:",
        "host:x",
        "host:0",
        "host:65536",
        "http://host:2379",
        "host:2379/x",
        "[]:1",
    ],
)
@pytest.mark.parametrize("command", ["boundaries", "drain", "router", "decode"])
def test_an_etcd_that_cannot_be_named_so(
    capsys: pytest.CaptureFixture[str], command: str, endpoints: str
) -> None:
    worker = ["w"] if command == "drain" else []
    code, said = refusal(capsys, command, *worker, f"--etcd-endpoints={endpoints}")
    assert code == 2
    assert said.startswith("error: --etcd-endpoints: ")


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("decode", "--store-master"),
        ("prefill", "--store-master"),
        ("prefill", "--advertise"),
        ("doctor", "--endpoint"),
    ],
)
@pytest.mark.parametrize(
    "address", ["nonsense", ":1", "host:x", "host:0", "host:65536", "http://host:1", "h:1/x"]
)
def test_an_address_that_is_none(
    capsys: pytest.CaptureFixture[str], command: str, flag: str, address: str
) -> None:
    code, said = refusal(capsys, command, f"{flag}={address}")
    assert code == 2
    assert said.startswith(f"error: {flag}: ")
    assert "is not host:port" in said


@pytest.mark.parametrize("master", ["", "etcd://", "etcd://a:1;b", "etcd://a:1;", "redis://a:1"])
def test_a_master_that_nobody_could_find(capsys: pytest.CaptureFixture[str], master: str) -> None:
    code, said = refusal(capsys, "decode", f"--store-master={master}")
    assert code == 2
    assert said.startswith("error: --store-master: ")


@pytest.mark.parametrize(
    "master", ["a:1", "[::1]:50051", "etcd://a:1", "etcd://a:1;[::1]:2", "etcd://a:1,b:2"]
)
def test_addresses_that_are_some(master: str) -> None:
    config = WorkerConfig(store=StoreConfig(master=master), advertise="worker-0.workers:7000")
    assert config.store.master == master
    assert WorkerConfig(advertise="").advertise == DoctorConfig(endpoint="").endpoint == ""


@pytest.mark.parametrize("content", [None, b"no certificate"])
@pytest.mark.parametrize("command", ["boundaries", "drain"])
def test_a_certificate_for_etcd_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, content: bytes | None
) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_bytes(content)
    worker = ["w"] if command == "drain" else []
    assert main([command, *worker, f"--etcd-ca-cert={file}"]) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    reason = "cannot be read: No such file" if content is None else "is no PEM file"
    assert f"error: etcd.ca_cert: {file} {reason}" in said


@pytest.mark.cluster
@pytest.mark.parametrize("role", ["router", "decode"])
def test_a_role_does_not_start_without_its_certificate_for_etcd(tmp_path: Path, role: str) -> None:
    """A process of its own: a role sets signal handlers, logging and the environment. Without the file it ends."""
    argv = [role, "--port=0", f"--model={DEMO}", f"--etcd-ca-cert={tmp_path / 'none.pem'}"]
    ended = subprocess.run(
        [sys.executable, "-m", "deltaserve", *argv],
        capture_output=True,
        text=True,
        timeout=4 * HUNG,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("error: etcd.ca_cert: ")
    assert "READY" not in ended.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"rooter": {"port": 1}}', '"rooter" is no command; did you mean router?'),
        ('{"port": 1}', '"port" is no command; fields belong into {"up": {…}}'),
        ('{"up": {"log": 3}}', '"log": input should be a valid dictionary'),
        ('{"up": {"log": {"level": "loud"}}}', '"log.level" in {file}: input should be'),
    ],
)
def test_what_a_file_says_in_vain_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "c.json"
    file.write_text(text)
    code, said = refusal(capsys, "up", "--config", str(file))
    assert code == 2
    assert words.replace("{file}", str(file)) in said


def test_a_file_may_be_for_several_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"router": {"port": 1}, "up": {"port": "x"}}))
    assert refusal(capsys, "up", "--config", str(file))[1].startswith('error: "port" in ')


def test_a_refused_value_is_repeated_up_to_a_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert "x" * 20 in refusal(capsys, "up", "--port", "x" * 20)[1]
    assert len(refusal(capsys, "up", "--port", "x" * 20_000)[1]) < 500
    assert "got" not in refusal(capsys, "drain")[1]


# ---- top and verify, at what is no router


@pytest.fixture
def stranger() -> Iterator[Any]:
    """`stranger(answer)`: URL of a server that gives this answer to every GET; None: it speaks no HTTP."""
    ends: list[Any] = []

    def serve(answer: bytes | None) -> str:
        if answer is None:
            listener = socket.create_server(("127.0.0.1", 0))

            def greet() -> None:
                try:
                    while True:
                        client, _ = listener.accept()
                        client.recv(1000)
                        client.sendall(b"SSH-2.0-x\r\n")
                        client.close()
                except OSError:
                    return

            threading.Thread(target=greet, daemon=True).start()
            ends.append(listener.close)
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                return

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ends.extend((server.server_close, server.shutdown))
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for end in reversed(ends):
        end()


@pytest.mark.parametrize("answer", [b"[1, 2]", b'{"status": "ok"}', b"<html>", b"", DEEP.encode(), None])
def test_top_at_a_stranger(capsys: pytest.CaptureFixture[str], stranger: Any, answer: bytes | None) -> None:
    code, said = refusal(capsys, "top", "--once", "--endpoint", stranger(answer))
    assert code == 1
    assert said.startswith("error: http://127.0.0.1")


@pytest.mark.parametrize("endpoint", ["", "foo", "http://[", "http://127.0.0.1:abc", "ftp://x", "http://"])
def test_top_at_what_is_no_url(capsys: pytest.CaptureFixture[str], endpoint: str) -> None:
    assert refusal(capsys, "top", "--once", "--endpoint", endpoint)[0] == 1


@pytest.mark.parametrize("model", [command.model for command in COMMANDS])
def test_every_configuration_is_strict(model: type[BaseModel]) -> None:
    """Nested ones too: a new one cannot forget it."""
    found, seen = [model], set()
    while found:
        one = found.pop()
        seen.add(one)
        assert one.model_config.get("extra") == "forbid", one
        assert one.model_config.get("allow_inf_nan") is False, one
        inner = (field.annotation for field in one.model_fields.values())
        found += [i for i in inner if isinstance(i, type) and issubclass(i, BaseModel) and i not in seen]
