# SPDX-License-Identifier: Apache-2.0
"""Hostile input against the router's process over worker doubles: no crash, no leak, the right status.

A list of raw bytes, bodies that are hard to read, and requests generated from the router's own OpenAPI document. After
each kind everything that a request holds must be back: places at the door, requests in flight, what workers hold, file
descriptors.
"""

from __future__ import annotations

import errno
import json
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.support.started_router import ROOT, Router, Workers, wait_until

pytestmark = pytest.mark.cluster  # a router process of its own
WAIT = 60.0
"""Seconds; nothing here is expected to take long, and nothing is measured."""
BODY = b'{"model": "demo", "prompt": "x", "max_tokens": 2}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
SECRETS = {"key": "a-secret-of-the-test-alone"}
PRIVATE = "a prompt that is nobody's business"
CLIENT = httpx.Client(verify=False, timeout=WAIT, limits=httpx.Limits(max_keepalive_connections=0))
"""Opens a connection for each request, and reads no certificates for it."""
NONE = ()
"""The connection ends without an answer."""


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers()
    for double in (made.prefill, made.decode):
        double.knobs.stop_after = 6  # whatever max_tokens a fuzzer asks for
    made.start()
    yield made
    for double in (made.prefill, made.decode):
        made.call(double.stop())


@pytest.fixture(scope="module")
def router(workers: Workers) -> Iterator[Router]:
    made = Router([workers.prefill, workers.decode])
    wait_until(lambda: CLIENT.get(f"{made.url}/health").json()["status"] == "ok", WAIT)
    yield made
    made.process.kill()
    made.process.wait()


@pytest.fixture(autouse=True)
def nothing_is_left(router: Router, workers: Workers) -> Iterator[None]:
    """After each test: the process lives, has said nothing of an exception, and holds what it held before."""
    process = psutil.Process(router.process.pid)
    wait_until(lambda: _quiet(router, workers), WAIT)
    before = process.num_fds()
    yield
    wait_until(lambda: _quiet(router, workers), WAIT)
    # One more may be open: the connection that this test's own client keeps.
    wait_until(lambda: process.num_fds() <= before + 1, WAIT)
    assert router.process.poll() is None
    assert "Traceback" not in "".join(router.errors)


def _quiet(router: Router, workers: Workers) -> bool:
    """Whether no request is anywhere."""
    metrics = CLIENT.get(f"{router.url}/metrics").text
    gauges = re.findall(r"^deltaserve_router_(?:in_flight|inside|queued) (\S+)$", metrics, re.MULTILINE)
    assert len(gauges) == 3
    held = CLIENT.get(f"{router.url}/health").json()["in_flight"]
    doubles = (workers.prefill, workers.decode)
    return (
        not held
        and not any(map(float, gauges))
        and not any(double.held or double.boundaries for double in doubles)
    )


def exchange(router: Router, data: bytes, *, close: bool = True) -> tuple[int, ...]:
    """The statuses of what comes back until the router closes; `close`: say that nothing more will be sent."""
    host, _, port = router.url.removeprefix("http://").partition(":")
    received = b""
    with socket.create_connection((host, int(port)), WAIT) as client:
        try:
            client.sendall(data)
            if close:
                client.shutdown(socket.SHUT_WR)
            while chunk := client.recv(1 << 16):
                received += chunk
        except OSError as error:
            # Closed while we were still sending: reset, or no connection left to shut down.
            if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
                raise
    return tuple(int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received))


def test_what_is_right_is_answered(router: Router) -> None:
    """The control: the same sender, without a fault."""
    length = b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(BODY)
    assert exchange(router, HEAD + length + BODY, close=False) == (200,)
    chunked = b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (
        len(BODY),
        BODY,
    )
    assert exchange(router, HEAD + chunked, close=False) == (200,)
    two = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert exchange(router, two, close=False) == (200, 200)


def test_a_client_that_waits_to_be_told_to_go_on(router: Router) -> None:
    head = HEAD + b"Content-Length: %d\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n" % len(BODY)
    assert exchange(router, head + BODY, close=False) == (100, 200)


SMUGGLED = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
FRAMING = {
    "length and chunked": HEAD
    + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "chunked and length": HEAD
    + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "two lengths": HEAD + b"Content-Length: 4\r\nContent-Length: 60\r\n\r\n{}  " + SMUGGLED,
    "two equal lengths": HEAD + b"Content-Length: 4\r\nContent-Length: 4\r\n\r\n{}  ",
    "a list of lengths": HEAD + b"Content-Length: 4, 4\r\n\r\n{}  ",
    "negative length": HEAD + b"Content-Length: -4\r\n\r\n{}  ",
    "length with a sign": HEAD + b"Content-Length: +4\r\n\r\n{}  ",
    "length in hexadecimal": HEAD + b"Content-Length: 0x4\r\n\r\n{}  ",
    "length beyond 64 bits": HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n{}",
    "another encoding": HEAD + b"Transfer-Encoding: gzip\r\n\r\n" + SMUGGLED,
    "encodings in a list": HEAD + b"Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "chunked is not last": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "two encodings": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "a hidden encoding": HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "no chunk's size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a chunk beyond 64 bits": HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}",
    "a chunk longer than it says": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}{}\r\n0\r\n\r\n",
    "folded header": b"GET /version HTTP/1.1\r\nHost: x\r\nX-A: b\r\n c: d\r\n\r\n",
    "folded first header": b"GET /version HTTP/1.1\r\n Host: x\r\n\r\n",
    "space before the colon": b"GET /version HTTP/1.1\r\nHost : x\r\n\r\n",
    "no colon": b"GET /version HTTP/1.1\r\nHost: x\r\nnothing\r\n\r\n",
    "a name that is none": b"GET /version HTTP/1.1\r\nHost: x\r\nb@d n@me: y\r\n\r\n",
    "NUL in a header": b"GET /version HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n",
    "a bare CR in a header": b"GET /version HTTP/1.1\r\nHost: x\r\nA: b\rc: d\r\n\r\n",
    "no Host": b"GET /version HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET /version HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    "no version": b"GET /version\r\n\r\n",
    "an unknown version": b"GET /version HTTP/4.2\r\nHost: x\r\n\r\n",
    "HTTP/2 at once": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an unknown method": b"FOO /version HTTP/1.1\r\nHost: x\r\n\r\n",
    "no target": b"GET  HTTP/1.1\r\nHost: x\r\n\r\n",
    "bytes in the target": b"GET /v\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS in the clear": bytes.fromhex("16030100a5010000a10303") + bytes(range(160)),
}


@pytest.mark.parametrize("name", FRAMING)
def test_what_two_readers_could_understand_differently(router: Router, name: str) -> None:
    assert exchange(router, FRAMING[name], close=False) == (400,)


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (b"", NONE),
        (b"GET /ver", NONE),
        (HEAD + b"Content-Le", NONE),
        (HEAD + b"Content-Length: 50\r\n\r\n{", NONE),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", NONE),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 70_000 + b"\r\n\r\n", (431,)),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 1_000_000, (431,)),
        (b"GET /version HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 20_000 + b"\r\n", (431,)),
        (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", (431,)),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_truncated_and_oversized(router: Router, data: bytes, statuses: tuple[int, ...]) -> None:
    found = exchange(router, data)
    # An answer may be lost with a connection that its sender is still filling.
    assert found == statuses or (found == NONE and len(data) > 65536)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /%00/%2e%2e/v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"GET /v1/../v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"GET http://elsewhere/v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"TRACE /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405),
        (b"GET /version HTTP/1.0\r\n\r\n", 200),
        (
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
            200,  # as if it had not asked
        ),
        (HEAD + b"Content-Length: 0\r\nConnection: close\r\n\r\n", 400),
    ],
)
def test_odd_but_clear(router: Router, data: bytes, status: int) -> None:
    assert exchange(router, data, close=False)[:1] == (status,)


def test_a_body_that_says_that_it_is_too_long(router: Router) -> None:
    # Answered once it has had time to come, so that a client reads the answer.
    assert exchange(router, HEAD + b"Content-Length: 99999999\r\n\r\n{}", close=False) == (413,)


def test_a_trailer_is_no_header(router: Router) -> None:
    trailer = (
        b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n%x\r\n%s\r\n0\r\nX-Priority: high\r\n\r\n"
    )
    assert exchange(router, HEAD + trailer % (len(BODY), BODY), close=False) == (200,)
    header = b"X-Priority: high\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(BODY)
    assert exchange(router, HEAD + header + BODY, close=False) == (400,)


def test_noise(router: Router) -> None:
    noise = random.Random(8)
    right = HEAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(BODY) + BODY
    for _ in range(60):
        assert exchange(router, noise.randbytes(noise.randrange(1, 3000))) in (NONE, (400,))
        damaged = bytearray(right)
        for _ in range(noise.randrange(1, 4)):
            damaged[noise.randrange(len(damaged))] = noise.randrange(256)
        assert all(status < 500 for status in exchange(router, bytes(damaged)))


def test_clients_that_leave_in_the_middle(router: Router) -> None:
    body = json.dumps({"model": "demo", "prompt": "x " * 300, "max_tokens": 200, "stream": True}).encode()
    host, _, port = router.url.removeprefix("http://").partition(":")
    for read in (0, 1, 100, 2000) * 5:
        with socket.create_connection((host, int(port)), WAIT) as client:
            client.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            left = read
            while left > 0 and (chunk := client.recv(left)):
                left -= len(chunk)


# ---- bodies


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "demo", "prompt": "x", "max_tokens": 2, **fields}).encode()


BODIES = {
    "deep list": b"[" * 200_000,
    "deep list, closed": b"[" * 50_000 + b"]" * 50_000,
    "deep object": b'{"a":' * 100_000,
    "deep in a field": b'{"model": "demo", "prompt": "x", "user": ' + b"[" * 60_000 + b"]" * 60_000 + b"}",
    "deep schema": body(structured_outputs={"json": json.loads('{"items":' * 300 + "{}" + "}" * 300)}),
    "a number of many digits": b'{"model": "demo", "prompt": "x", "max_tokens": ' + b"9" * 100_000 + b"}",
    "no number": b'{"model": "demo", "prompt": "x", "temperature": NaN}',
    "infinite": b'{"model": "demo", "prompt": "x", "temperature": 1e999}',
    "bad UTF-8": b'{"model": "demo", "prompt": "\xc3\x28"}',
    "overlong UTF-8": b'{"model": "demo", "prompt": "\xc0\xaf"}',
    "cut off": BODY[:-9],
    "two documents": BODY + BODY,
    "a string": b'"x"',
    "null": b"null",
    "negative token": body(prompt=[-1]),
    "huge token": body(prompt=[2**70]),
    "token is a boolean": body(prompt=[[True, None]]),
    "many prompts": body(prompt=["x"] * 129),
    "very many prompts": body(prompt=[[5]] * 100_000),
    "many answers": body(n=129, temperature=1),
    "endless regex": body(structured_outputs={"regex": "(" * 2000}),
    "bad grammar": body(structured_outputs={"grammar": "root ::= ("}),
    "many biases": body(logit_bias={str(i): 1 for i in range(5000)}),
    "seed beyond 64 bits": body(seed=2**80),
    "unknown template variable": body(
        chat_template="{{ 1 / 0 }}", messages=[{"role": "user", "content": "x"}]
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_refused(router: Router, name: str) -> None:
    path = "/v1/chat/completions" if name == "unknown template variable" else "/v1/completions"
    found = CLIENT.post(
        router.url + path, content=BODIES[name], headers={"content-type": "application/json"}, timeout=WAIT
    )
    assert found.status_code == 400, found.text[:500]
    assert found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("half a surrogate", b'{"model": "demo", "prompt": "\\ud800 x", "max_tokens": 2}'),
        ("NUL", body(prompt="a\0b")),
        ("UTF-16", '{"model": "demo", "prompt": "x", "max_tokens": 2}'.encode("utf-16")),
        ("names twice", b'{"model": "other", "model": "demo", "prompt": "x", "max_tokens": 2}'),
        ("as many prompts as may be", body(prompt=["x"] * 128)),
    ],
)
def test_bodies_that_are_odd_but_clear(router: Router, name: str, content: bytes) -> None:
    found = CLIENT.post(
        f"{router.url}/v1/completions",
        content=content,
        headers={"content-type": "application/json"},
    )
    assert found.status_code == 200 if name != "half a surrogate" else found.status_code in (200, 400)


# ---- the OpenAPI document


def test_every_described_operation_survives_generated_requests(router: Router) -> None:
    document = CLIENT.get(f"{router.url}/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    statuses: dict[str, set[int]] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        seen = statuses.setdefault(operation.label, set())
        _fuzz(operation, router.url, seen)
    assert {"POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize", "GET /v1/models"} <= set(
        statuses
    )
    assert statuses["GET /v1/models"] == {200}
    assert any(status >= 400 for seen in statuses.values() for status in seen), "nothing was ever refused"


def _fuzz(operation: Any, url: str, seen: set[int]) -> None:
    @settings(
        max_examples=12,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def send(case: Any) -> None:
        found = case.call(base_url=url, timeout=WAIT)
        seen.add(found.status_code)
        assert found.status_code < 500, (operation.label, case.body, found.text[:500])
        if found.status_code >= 400:
            assert "error" in found.json()

    send()


def test_the_document_names_what_is_served(router: Router) -> None:
    document = CLIENT.get(f"{router.url}/openapi.json").json()
    for path, operations in document["paths"].items():
        if "{" not in path:
            for method in operations:
                assert CLIENT.request(method.upper(), router.url + path).status_code not in (
                    404,
                    405,
                )
    assert "/scale_elastic_ep" not in document["paths"]


# ---- secrets


def test_secrets_are_not_written_down(workers: Workers, tmp_path: Any) -> None:
    """A router with keys, used rightly and wrongly, does not speak of them; the same look finds what it says."""
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"somebody": SECRETS}))
    made = Router(
        [workers.prefill, workers.decode], api_keys=str(keys), log={"level": "debug", "format": "json"}
    )
    try:
        wrong = "a-wrong-secret-of-the-test"
        answers = []
        for key in (SECRETS["key"], wrong):
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            for path, content in (
                ("/v1/completions", BODY),
                ("/v1/completions", b"{no"),
                ("/v1/completions", body(prompt=PRIVATE)),
                ("/v1/completions", body(prompt=PRIVATE, temperature=-1)),
                ("/v1/completions", body(model=key)),
                ("/v1/messages", BODY),
                ("/nothing", BODY),
            ):
                answers.append(CLIENT.post(made.url + path, content=content, headers=headers))
                exchange(
                    made,
                    b"GET /version HTTP/1.1\r\nAuthorization: Bearer " + key.encode() + b"\r\nb@d\r\n\r\n",
                )
        assert {answer.status_code for answer in answers[:7]} == {200, 400, 404}
        assert {answer.status_code for answer in answers[7:]} == {401}
        headers = {"authorization": f"Bearer {SECRETS['key']}", "x-request-id": "named-in-the-log"}
        CLIENT.post(f"{made.url}/v1/completions", content=BODY, headers=headers)
        wait_until(lambda: "named-in-the-log" in "".join(made.errors), WAIT)
        said = "".join([*made.lines, *made.errors, CLIENT.get(f"{made.url}/metrics").text])
        for secret in (SECRETS["key"], wrong, PRIVATE):
            assert secret not in said
        command = " ".join(psutil.Process(made.process.pid).cmdline())
        assert SECRETS["key"] not in command
    finally:
        made.process.kill()
        made.process.wait()


def test_a_secret_that_is_written_down_is_found() -> None:
    """The control of the look above: the same kind of process, with a log line of the header."""
    code = "import logging, sys; logging.warning('authorization: %s', sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, SECRETS["key"]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert SECRETS["key"] in done.stdout + done.stderr
