# SPDX-License-Identifier: Apache-2.0
"""Certificates and keys in PEM files."""

from __future__ import annotations

from pathlib import Path


class PemUnusable(ValueError):
    """A file cannot be read, or is no PEM file; the message names the field and the file."""


def read_pem(field: str, path: Path) -> bytes:
    """The content of the file that the configuration's `field` names. Raises PemUnusable."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PemUnusable(f"{field}: {path} cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in data:
        raise PemUnusable(f"{field}: {path} is no PEM file")
    return data
