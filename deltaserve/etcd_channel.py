# SPDX-License-Identifier: Apache-2.0
"""The gRPC channel to etcd: endpoints, TLS, and how fast a lost connection is tried again."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from deltaserve.addresses import join, split
from deltaserve.config import EtcdConfig
from deltaserve.pem import read_pem

MAX_MESSAGE = 16 << 20
"""Bytes of the largest answer; a listing of some thousand boundaries fits."""


class EtcdUnavailable(ConnectionError):
    """etcd did not answer in time, or not in a usable way."""


def credentials(config: EtcdConfig) -> grpc.ChannelCredentials | None:
    """What TLS to etcd needs; None: in the clear. Raises PemUnusable."""
    if config.ca_cert is None:
        return None
    return grpc.ssl_channel_credentials(
        _pem("ca_cert", config.ca_cert),
        _pem("client_key", config.client_key),
        _pem("client_cert", config.client_cert),
    )


def open_channel(config: EtcdConfig) -> grpc.aio.Channel:
    """A channel that spreads its calls over all endpoints. Raises PemUnusable."""
    options: list[tuple[str, Any]] = [
        ("grpc.lb_policy_name", "round_robin"),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 3_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.max_receive_message_length", MAX_MESSAGE),
        ("grpc.enable_http_proxy", 0),
        # Two clients of one process must not share a connection: one's close would be the other's.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    target, authority = _target(config.endpoints)
    secure = credentials(config)
    if secure is None:
        return grpc.aio.insecure_channel(target, options=options)
    options.append(("grpc.ssl_target_name_override", authority))
    return grpc.aio.secure_channel(target, secure, options=options)


def _target(endpoints: Sequence[str]) -> tuple[str, str]:
    """gRPC's target that spreads calls over the endpoints, and the host whose certificate is checked.

    With TLS and several endpoints, every certificate must name the first endpoint's host.
    """
    hosts = [split(endpoint) for endpoint in endpoints]
    first = hosts[0][0]
    if len(hosts) == 1 and not _is_address(first):
        return f"dns:///{endpoints[0]}", first
    addresses = [address for host, port in hosts for address in _resolve(host, port)]
    four = [address for address in addresses if not address.startswith("[")]
    return (f"ipv4:{','.join(four)}" if four else f"ipv6:{','.join(addresses)}"), first


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _resolve(host: str, port: int) -> list[str]:
    if _is_address(host):
        return [join(host, port)]
    try:
        found = socket.getaddrinfo(host, port, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except OSError as error:
        raise EtcdUnavailable(f"etcd.endpoints: {host} cannot be resolved: {error}") from error
    return [f"{found_at[4][0]!s}:{port}" for found_at in found]


def _pem(field: str, path: Path | None) -> bytes | None:
    return None if path is None else read_pem(f"etcd.{field}", path)
