# SPDX-License-Identifier: Apache-2.0
"""TLS: what a configuration may hold, who gets through to a worker, and a router that starts with bad files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from pydantic import ValidationError

from deltaserve import tls
from deltaserve.config import RouterConfig, TlsConfig, WorkerConfig, WorkerTlsConfig
from deltaserve.membership import Member
from deltaserve.wire import codec
from deltaserve.wire import worker_pb2 as pb
from deltaserve.wire.worker_pb2_grpc import WorkerServicer, WorkerStub, add_WorkerServicer_to_server
from router.main import Failed, _check_tls
from router.worker_link import Dial, LinkDown, WorkerLink
from tests.support.pki import make_certificates


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("pki"), "router")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("strangers"), "router")


def end(folder: Path, name: str, authority: Path | None = None) -> dict[str, Path]:
    return {
        "ca_cert": (authority or folder) / "ca.pem",
        "cert": folder / f"{name}.pem",
        "key": folder / f"{name}.key",
    }


class Describing(WorkerServicer):
    """Says that it is there."""

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.WorkerDescription:
        return pb.WorkerDescription(worker_id="decode-0")


async def described(server: dict[str, Path], client: dict[str, Any]) -> str:
    """What a client with these files hears from a worker with those."""
    serving = grpc.aio.server(options=codec.SERVER_OPTIONS)
    add_WorkerServicer_to_server(Describing(), serving)
    credentials = tls.server_credentials(TlsConfig(**server))
    if credentials is None:
        port = serving.add_insecure_port("127.0.0.1:0")
    else:
        port = serving.add_secure_port("127.0.0.1:0", credentials)
    await serving.start()
    opener = tls.channel_opener(WorkerTlsConfig(**client))
    try:
        async with opener(f"127.0.0.1:{port}", codec.CHANNEL_OPTIONS) as channel:
            answer = await WorkerStub(channel).Describe(pb.DescribeRequest(), timeout=30)
            return str(answer.worker_id)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    finally:
        await serving.stop(0)


async def test_who_gets_through(pki: Path, strangers: Path) -> None:
    worker = end(pki, "server")
    assert await described(worker, end(pki, "router")) == "decode-0"
    assert await described({}, {}) == "decode-0"
    assert await described(worker, {}) == "UNAVAILABLE", "in the clear"
    assert await described({}, end(pki, "router")) == "UNAVAILABLE", "to a worker in the clear"
    assert await described(worker, end(strangers, "router", pki)) == "UNAVAILABLE", "signed by a stranger"
    assert await described(end(strangers, "server"), end(pki, "router")) == "UNAVAILABLE", "a strange worker"


async def test_the_worker_must_have_the_name(pki: Path) -> None:
    worker = end(pki, "server")
    assert await described(worker, {**end(pki, "router"), "server_name": "localhost"}) == "decode-0"
    assert await described(worker, {**end(pki, "router"), "server_name": "another"}) == "UNAVAILABLE"


@pytest.mark.parametrize("missing", ["ca_cert", "cert", "key"])
def test_half_of_the_files_is_refused(missing: str) -> None:
    files = {name: Path(f"{name}.pem") for name in ("ca_cert", "cert", "key") if name != missing}
    with pytest.raises(ValidationError, match=f"{missing} is missing"):
        WorkerConfig(tls=files)
    with pytest.raises(ValidationError, match=f"{missing} is missing"):
        RouterConfig(worker_tls=files)


@pytest.mark.parametrize(("given", "missing"), [("tls_cert", "tls_key"), ("tls_key", "tls_cert")])
def test_half_of_the_endpoints_files_is_refused(given: str, missing: str) -> None:
    with pytest.raises(ValidationError, match=f"{missing} is missing"):
        RouterConfig(**{given: Path("x.pem")})


def test_a_file_that_cannot_be_used_is_named(pki: Path, tmp_path: Path) -> None:
    files = end(pki, "router")
    with pytest.raises(ValueError, match=r"worker_tls\.key: .*nowhere"):
        tls.channel_opener(WorkerTlsConfig(**{**files, "key": tmp_path / "nowhere"}))
    (tmp_path / "text").write_text("x")
    with pytest.raises(ValueError, match=r"tls\.cert: .*text is no PEM file"):
        tls.server_credentials(TlsConfig(**{**files, "cert": tmp_path / "text"}))
    _check_tls(RouterConfig(tls_cert=pki / "server.pem", tls_key=pki / "server.key"))
    for certificate, key in (
        (tmp_path / "text", pki / "server.key"),
        (pki / "server.pem", pki / "router.key"),
    ):
        with pytest.raises(Failed, match="--tls-cert"):
            _check_tls(RouterConfig(tls_cert=certificate, tls_key=key))


@pytest.mark.parametrize(
    ("role", "theirs", "ours", "fits"),
    [
        ("decode", "kimi_k2", "kimi_k2", True),
        ("decode", "", "kimi_k2", False),
        ("prefill", "", "kimi_k2", True),
    ],
)
async def test_a_worker_with_another_reasoning_parser_is_not_used(
    role: Any, theirs: str, ours: str, fits: bool
) -> None:
    member = Member(f"{role}-0", role, "127.0.0.1:1", "digest", "geometry", 1)
    link = WorkerLink(member, None, Dial(reasoning_parser=ours))  # type: ignore[arg-type]
    description = pb.WorkerDescription(
        worker_id=member.worker_id, role=role, model_digest="digest", reasoning_parser=theirs
    )
    await asyncio.sleep(0)
    if fits:
        link._check(description)
        return
    with pytest.raises(LinkDown, match="--reasoning-parser"):
        link._check(description)
