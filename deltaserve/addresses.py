# SPDX-License-Identifier: Apache-2.0
"""Addresses as they stand in URLs and endpoints: an IPv6 address has colons of its own, so it goes into brackets."""

from __future__ import annotations


def bracketed(host: str) -> str:
    """A name or an address as the host of host:port (RFC 3986, 3.2.2)."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def join(host: str, port: int) -> str:
    """host:port."""
    return f"{bracketed(host)}:{port}"


def split(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of host:port. Raises ValueError where the port is no number."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
