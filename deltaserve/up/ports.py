# SPDX-License-Identifier: Apache-2.0
"""Ports: is one taken, by whom, and which are free.

Free ports are taken from below the kernel's range for outgoing connections. One from inside that range could be handed
to somebody's outgoing connection while etcd restarts, and etcd has to come back on the port that everybody knows.
"""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

import psutil

from deltaserve.up.errors import ClusterError

_LOWEST = 10_000
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. Lingering closed connections do not count as taken."""
    return _refusal(host, port) is None


def _refusal(host: str, port: int) -> OSError | None:
    """Why no server could listen there now; None: one could."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error
    return None


def require_free(host: str, port: int) -> None:
    """Raises ClusterError naming the port, its holder where it can be seen, and the remedy. Port 0 is any."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ClusterError(
            f"host {host}: {error.strerror}; choose an address of this machine with --host"
        ) from error
    refusal = _refusal(host, port)
    if refusal is None:
        return
    if refusal.errno != errno.EADDRINUSE:
        raise ClusterError(
            f"port {port} on {host}: {refusal.strerror}; choose an address of this machine with --host, "
            "and a port that this user may take with --port"
        )
    raise ClusterError(
        f"port {port} on {host} is taken{_holder(port)}; stop what holds it, or choose another with --port"
    )


def _holder(port: int) -> str:
    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass
    return ""


def choose(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different ports that are free now, below the range for outgoing connections.

    Raises ClusterError when there are not so many.
    """
    try:
        highest = int(_EPHEMERAL_RANGE.read_text(encoding="ascii").split()[0]) - 1
    except (OSError, ValueError, IndexError):
        highest = 32_767
    if highest - _LOWEST < 1000:  # a machine with an unusual range: any port above the system's will do
        highest = 65_535
    candidates = list(range(_LOWEST, highest + 1))
    random.SystemRandom().shuffle(candidates)
    ports: list[int] = []
    for port in candidates:
        if len(ports) == count:
            return ports
        if is_free(host, port):
            ports.append(port)
    raise ClusterError(f"no {count} free ports between {_LOWEST} and {highest} on {host}")
