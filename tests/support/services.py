# SPDX-License-Identifier: Apache-2.0
"""Real etcd and Mooncake master processes for tests, on free loopback ports, in temporary folders.

Context managers; `tests/support/fixtures.py` makes pytest fixtures of them. Leaving one kills its process and removes
its folder, whatever the test did to it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deltaserve.config import EtcdConfig, StoreConfig
from deltaserve.up.binaries import find_etcd, find_master

START_SECONDS = 15.0


def free_port() -> int:
    """A port below the range for outgoing connections, so that a restarted service finds it free again."""
    low, high = 10_000, 30_000
    start = low + (os.getpid() * 7919 + time.monotonic_ns() // 1000) % (high - low)
    for port in [*range(start, high), *range(low, start)]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            if port not in _given:
                _given.add(port)
                return port
    raise RuntimeError("no free port")


_given: set[int] = set()


class Service:
    """A process that can be killed, stopped (it hangs), continued and started again on the same port and data."""

    def __init__(self, name: str, command: Sequence[str], port: int, folder: Path) -> None:
        self.name, self.command, self.port, self.folder = name, list(command), port, folder
        self.process: subprocess.Popen[bytes] | None = None
        self.health: str | None = None
        self.client: tuple[Path, Path] | None = None
        """Certificate and key with which `health` is asked, where clients need one."""

    @property
    def log(self) -> str:
        """What it has written."""
        return (self.folder / f"{self.name}.log").read_text(errors="replace")

    def start(self) -> None:
        """Start and wait until it is ready: its port is open, and `health`, where it has one, says so."""
        self.launch()
        assert self.process is not None
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 0.5).close()
                if self._healthy():
                    return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not start:\n{self.log[-2000:]}")
            time.sleep(0.02)

    def launch(self) -> None:
        """Start and wait for nothing."""
        with open(self.folder / f"{self.name}.log", "ab") as output:
            self.process = subprocess.Popen(self.command, stdout=output, stderr=output, cwd=self.folder)

    def _healthy(self) -> bool:
        if self.health is None:
            return True
        # A certificate of the test's own; who answers is not in doubt on a port that this process has just taken.
        trust = ssl.create_default_context()
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
        if self.client is not None:
            trust.load_cert_chain(*self.client)
        try:
            with urllib.request.urlopen(self.health, timeout=1, context=trust) as answer:
                return b'"true"' in answer.read()
        except (OSError, TimeoutError):
            return False

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def hang(self) -> None:
        """Stop it: connections stay open, nobody answers. Returns when all its threads have stopped."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Let it go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def _service(
    name: str,
    command: Callable[[int, Path], Sequence[str]],
    health: str = "",
    client: tuple[Path, Path] | None = None,
    start: bool = True,
) -> Iterator[Service]:
    folder = Path(tempfile.mkdtemp(prefix=f"deltaserve-{name}-"))
    port = free_port()
    service = Service(name, command(port, folder), port, folder)
    service.health, service.client = health.format(port=port) or None, client
    try:
        if start:
            service.start()
        yield service
    finally:
        service.kill()
        shutil.rmtree(folder, ignore_errors=True)


class EtcdService:
    """A single etcd."""

    def __init__(self, service: Service, scheme: str) -> None:
        self.service, self.scheme = service, scheme

    @property
    def endpoint(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.service.port}"

    def config(self, prefix: str, **changes: object) -> EtcdConfig:
        """A configuration for it."""
        values: dict[str, object] = {
            "endpoints": [self.endpoint],
            "prefix": prefix,
            "timeout": 2.0,
            "lease_ttl": 2,
        }
        return EtcdConfig.model_validate({**values, **changes})


@contextlib.contextmanager
def etcd(
    extra: Sequence[str] = (), scheme: str = "http", client: tuple[Path, Path] | None = None
) -> Iterator[EtcdService]:
    """One etcd with its data in a temporary folder; `scheme` https needs certificates in `extra`.

    `client`: certificate and key of a client, where etcd wants one of everybody.
    """

    def command(port: int, folder: Path) -> list[str]:
        peer = free_port()
        client_url = f"{scheme}://127.0.0.1:{port}"
        return [
            str(find_etcd().path),
            "--name=test",
            f"--data-dir={folder / 'data'}",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=test=http://127.0.0.1:{peer}",
            "--logger=zap",
            "--log-level=warn",
            # One member has nobody to wait for before it elects itself.
            "--heartbeat-interval=20",
            "--election-timeout=200",
            *extra,
        ]

    with _service("etcd", command, f"{scheme}://127.0.0.1:{{port}}/health", client) as service:
        yield EtcdService(service, scheme)


@contextlib.contextmanager
def etcd_cluster(size: int = 3) -> Iterator[list[EtcdService]]:
    """An etcd of several members; one may be killed and started again, and the others go on."""
    peers = [f"http://127.0.0.1:{free_port()}" for _ in range(size)]
    initial = ",".join(f"member{number}={peer}" for number, peer in enumerate(peers))

    def command(number: int) -> Callable[[int, Path], list[str]]:
        def build(port: int, folder: Path) -> list[str]:
            return [
                str(find_etcd().path),
                f"--name=member{number}",
                f"--data-dir={folder / 'data'}",
                f"--listen-client-urls=http://127.0.0.1:{port}",
                f"--advertise-client-urls=http://127.0.0.1:{port}",
                f"--listen-peer-urls={peers[number]}",
                f"--initial-advertise-peer-urls={peers[number]}",
                f"--initial-cluster={initial}",
                "--logger=zap",
                "--log-level=warn",
                "--heartbeat-interval=50",
                "--election-timeout=500",
            ]

        return build

    with contextlib.ExitStack() as stack:
        members = [
            stack.enter_context(
                _service(f"etcd{number}", command(number), "http://127.0.0.1:{port}/health", start=False)
            )
            for number in range(size)
        ]
        # None of them is healthy before most of them run.
        with ThreadPoolExecutor(size) as threads:
            list(threads.map(lambda member: member.start(), members))
        yield [EtcdService(member, "http") for member in members]


class MasterService:
    """A Mooncake master without HA."""

    def __init__(self, service: Service) -> None:
        self.service = service

    @property
    def address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.service.port}"

    def config(self, **changes: object) -> StoreConfig:
        """A configuration of a client."""
        values: dict[str, object] = {"master": self.address, "segment_bytes": 64 << 20, "timeout": 5.0}
        return StoreConfig.model_validate({**values, **changes})


def _master_command(port: int) -> list[str]:
    """A master; clients that are silent for 5 s are dead."""
    return [
        str(find_master().path),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={port}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={free_port()}",
        "--default_kv_lease_ttl=1000",
        "--client_ttl=5",
        "--eviction_ratio=0",
        "--eviction_high_watermark_ratio=1",
        "--logtostderr",
    ]


@contextlib.contextmanager
def mooncake_master() -> Iterator[MasterService]:
    """One master; clients that are silent for 5 s are dead."""

    def command(port: int, folder: Path) -> list[str]:
        return _master_command(port)

    with _service("master", command) as service:
        yield MasterService(service)


@contextlib.contextmanager
def mooncake_ha(etcd_endpoint: str, cluster_id: str, size: int = 2) -> Iterator[list[MasterService]]:
    """Masters of which one leads; what it knows is in etcd, and another one takes over. The first leads first."""

    def command(port: int, folder: Path) -> list[str]:
        return [
            *_master_command(port),
            "--enable_ha=true",
            "--ha_backend_type=etcd",
            f"--ha_backend_connstring={etcd_endpoint}",
            "--enable_oplog=true",
            f"--cluster_id={cluster_id}",
        ]

    with contextlib.ExitStack() as stack:
        masters = [stack.enter_context(_service(f"master{n}", command, start=False)) for n in range(size)]
        masters[0].start()
        for master in masters[1:]:
            # Its port opens when it leads.
            master.launch()
        yield [MasterService(master) for master in masters]
