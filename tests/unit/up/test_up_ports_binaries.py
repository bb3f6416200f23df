# SPDX-License-Identifier: Apache-2.0
"""Ports that are free or taken, and which etcd is refused."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from deltaserve.up import binaries, ports
from deltaserve.up.errors import ClusterError


def test_a_taken_port_is_named_with_its_holder_and_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            ClusterError, match=rf"port {port} on 127.0.0.1 is taken by .*pid {os.getpid()}.*--port"
        ):
            ports.require_free("127.0.0.1", port)
    ports.require_free("127.0.0.1", port)


@pytest.mark.parametrize("port", [0, 8000])
def test_an_address_of_another_machine_is_not_called_a_taken_port(port: int) -> None:
    with pytest.raises(ClusterError, match=rf"port {port} on 192.0.2.1: .*--host") as caught:
        ports.require_free("192.0.2.1", port)
    assert "taken" not in str(caught.value)


def test_chosen_ports_are_free_different_and_outside_the_outgoing_range() -> None:
    chosen = ports.choose(20)
    assert len(set(chosen)) == 20
    assert all(ports.is_free("127.0.0.1", port) for port in chosen)
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if lowest > 11_000:
        assert max(chosen) < lowest


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ((3, 3, 25), False),
        ((3, 4, 22), False),
        ((3, 4, 23), True),
        ((3, 4, 40), True),
        ((3, 5, 0), False),
        ((3, 5, 2), False),
        ((3, 5, 3), True),
        ((3, 6, 0), True),
        ((4, 0, 0), True),
    ],
)
def test_supported_etcd(version: tuple[int, ...], good: bool) -> None:
    assert binaries.etcd_supported(version) is good


def _etcd(folder: Path, version: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "etcd"
    path.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
    path.chmod(0o755)
    return path


def test_a_version_that_loses_data_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = _etcd(tmp_path, "3.5.1")
    with pytest.raises(ClusterError, match=r"3\.5\.1, which can lose committed data; install etcd 3\.4\.23"):
        binaries.find_etcd(str(path))


def test_the_installed_one_is_taken_when_the_one_on_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _etcd(tmp_path / "path", "3.3.25")
    good = _etcd(tmp_path / "prefix", "3.5.16")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")
    monkeypatch.setattr(binaries, "prefixes", lambda: [tmp_path / "prefix"])
    assert binaries.find_etcd() == binaries.Binary(good, "3.5.16")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}")
    monkeypatch.setattr(binaries, "prefixes", lambda: [])
    with pytest.raises(ClusterError, match=r"3\.3\.25, which is too old"):
        binaries.find_etcd()


def test_a_missing_binary_says_how_to_get_it() -> None:
    with pytest.raises(ClusterError, match="make install"):
        binaries.find_etcd("/no/such/etcd")
    with pytest.raises(ClusterError, match="--master-binary"):
        binaries.find_master("/no/such/master")
