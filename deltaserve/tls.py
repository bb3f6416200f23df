# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS between the router and the workers, and where a channel to a worker comes from.

Both sides show a certificate of one authority: a worker serves only whom the authority signed, so a stranger on the
network can neither give it work nor read what it computes; the router speaks only to a worker whose certificate names
the host it dialled, or `server_name`. The router reads its files at every connection that it opens, so a renewed
certificate is used from the next one on; a worker reads its own at its start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from deltaserve.config import TlsConfig, WorkerTlsConfig
from deltaserve.pem import read_pem

Options = list[tuple[str, Any]]


def server_credentials(tls: TlsConfig, field: str = "tls") -> grpc.ServerCredentials | None:
    """What a worker's server needs; None: in the clear. Raises ValueError naming a file that cannot be used."""
    if not tls.on:
        return None
    authority, certificate, key = (_pem(tls, name, field) for name in ("ca_cert", "cert", "key"))
    return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)


def channel_credentials(tls: TlsConfig, field: str = "worker_tls") -> grpc.ChannelCredentials | None:
    """What a client of a worker needs; None: in the clear. Raises ValueError naming a file that cannot be used."""
    if not tls.on:
        return None
    authority, certificate, key = (_pem(tls, name, field) for name in ("ca_cert", "cert", "key"))
    return grpc.ssl_channel_credentials(authority, key, certificate)


def channel_opener(tls: WorkerTlsConfig) -> Callable[[str, Options], grpc.aio.Channel]:
    """`open(address, options)`: a channel to a worker. Raises ValueError now when a file cannot be used."""
    channel_credentials(tls)

    def open_channel(address: str, options: Options) -> grpc.aio.Channel:
        credentials = channel_credentials(tls)
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        if tls.server_name:
            options = [*options, ("grpc.ssl_target_name_override", tls.server_name)]
        return grpc.aio.secure_channel(address, credentials, options=options)

    return open_channel


def _pem(tls: TlsConfig, name: str, field: str) -> bytes:
    return read_pem(f"{field}.{name}", getattr(tls, name))
