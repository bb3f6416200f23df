# SPDX-License-Identifier: Apache-2.0
"""Certificates of a test's own authority, made with the openssl program."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificates(folder: Path, *clients: str) -> Path:
    """ca, server (for 127.0.0.1 and localhost) and a certificate for each client name: NAME.pem and NAME.key."""
    (folder / "server.ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name in clients:
        (folder / f"{name}.ext").write_text("extendedKeyUsage=clientAuth\n")
    new_key = "openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    commands = [f"{new_key} -x509 -days 2 -subj /CN=authority -keyout ca.key -out ca.pem"]
    for name in ("server", *clients):
        commands.append(f"{new_key} -subj /CN={name} -keyout {name}.key -out {name}.csr")
        commands.append(
            f"openssl x509 -req -days 2 -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial "
            f"-extfile {name}.ext -out {name}.pem"
        )
    for command in commands:
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder
