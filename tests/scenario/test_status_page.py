# SPDX-License-Identifier: Apache-2.0
"""The status page in Chromium, and `deltaserve top`, over a cluster in this process.

`DELTASERVE_PICTURE=docs/images/ui.png pytest tests/scenario/test_status_page.py -k picture` makes the picture anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import uvicorn

from deltaserve.cli import top
from deltaserve.config import TopConfig
from router.gateway import Gateway
from statestore.connector.events import watch
from tests.scenario.stack import Barrier, Stack, Worker, running, until
from tests.support.browser import Page, browser

RANKS = 4


class Site:
    """A cluster whose router serves HTTP."""

    def __init__(self, stack: Stack, url: str) -> None:
        self.stack, self.url = stack, url

    async def state(self, key: str = "") -> tuple[int, Any]:
        """Status and document of /ui/state."""
        return await asyncio.to_thread(_get, f"{self.url}/ui/state", key)


def _get(url: str, key: str = "") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urlopen(Request(url, headers=headers), timeout=60) as reply:
            return reply.status, json.load(reply)
    except HTTPError as error:
        return error.code, json.load(error)


@contextlib.asynccontextmanager
async def serving(
    workers: tuple[str, ...] = ("prefill", "decode", "decode"), **router: Any
) -> AsyncIterator[Site]:
    """A cluster of workers with these roles, watched, behind the gateway."""

    async def nothing(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with running(**router) as stack:
        for role in workers:
            worker = Worker(stack, role, {}, tp=RANKS, max_num_seqs=8)
            watch(worker.worker_id, worker.service.on_event)
            await stack.start(worker)
        config = uvicorn.Config(
            Gateway(nothing, stack.dispatcher), port=0, log_config=None, lifespan="off", ws="none"
        )
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None
        task = asyncio.create_task(server._serve())
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield Site(stack, f"http://127.0.0.1:{port}")
        finally:
            server.should_exit = True
            await task
            for worker in stack.workers:
                watch(worker.worker_id, None)


async def shown(page: Page) -> None:
    """Wait until the page has shown a state that is younger than this call."""
    before = int(await page.run("Number(document.body.dataset.shown || 0)"))
    await page.until(f"Number(document.body.dataset.shown || 0) > {before + 1}")


async def reads(page: Page, selector: str, *words: str) -> None:
    """Wait until all of these words can be read in an element."""
    text = f"document.querySelector({json.dumps(selector)}).innerText"
    await page.until(f"{json.dumps(words)}.every(word => {text}.includes(word))")


async def test_the_page_shows_the_cluster_live() -> None:
    async with serving() as site, browser() as page:
        stack = site.stack
        await page.go(f"{site.url}/ui")
        await page.until("document.querySelector('#status').innerText === 'ok'")
        assert not await page.run("document.querySelector('#login').checkVisibility()"), (
            "nobody asks for a key"
        )
        for worker in stack.workers:
            assert worker.worker_id in await page.text("#pools")
        assert await page.text("#recent tbody") == "no request yet"
        ask = await stack.run(stack.prompt(60))
        name = ask.name.removesuffix("-0")
        # The page may show a moment before the request's end first.
        await reads(
            page, "#recent tbody tr", name, "handed over", f"{stack.prefill.worker_id} → ", "finished"
        )
        await page.until("document.querySelectorAll('#boundaries .rank.done').length === 8")
        await reads(page, "#boundaries", "committed", "loaded")
        await reads(page, "#choices", "handed over")
        # A short prompt is computed where it is decoded, and the page says why.
        await stack.run(stack.prompt(1))
        await page.until("document.querySelector('#recent').innerText.includes('here: single token')")
        lost = stack.decode
        await lost.kill()
        await page.until(f"document.querySelector('#faults').innerText.includes('{lost.worker_id}')")
        assert not page.problems, page.problems
        assert await page.run("document.documentElement.scrollWidth <= window.innerWidth"), "it fits a laptop"
        await page.resize(420, 800)
        await shown(page)
        assert await page.run("document.documentElement.scrollWidth <= window.innerWidth"), "and a telephone"


async def test_the_page_shows_ranks_while_they_write() -> None:
    barrier = Barrier()
    async with serving(("prefill", "decode")) as site, browser() as page:
        stack = site.stack

        def slow_last_rank(operation: str, key: str) -> None:
            if key.endswith(f"/kda/{RANKS - 1}") and operation in ("reserve", "put"):
                barrier()

        stack.store.before = slow_last_rank
        ask = stack.ask(stack.prompt(60))
        await page.go(f"{site.url}/ui")
        try:
            await page.until("document.querySelectorAll('#boundaries .rank.busy').length === 1")
            assert await page.run("document.querySelectorAll('#boundaries .rank.done').length") == RANKS - 1
            assert "writing" in await page.text("#boundaries")
        finally:
            barrier.open()
        await stack.end(ask)
        await page.until("document.querySelectorAll('#boundaries .rank.busy').length === 0")


async def test_what_a_cluster_says_is_never_markup() -> None:
    async with serving(("prefill", "decode")) as site, browser() as page:
        evil = "<img src=x onerror=document.title='owned'>"
        await site.stack.run(site.stack.prompt(60))
        for trace in site.stack.dispatcher.traces.recent():
            trace.why = trace.request_id = evil
        await page.go(f"{site.url}/ui")
        await page.until("document.querySelector('#recent').innerText.includes('onerror')")
        assert await page.run("document.querySelectorAll('img').length") == 0
        assert await page.run("document.title") == "deltaserve"


async def test_the_state_needs_a_key_where_there_are_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"me": {"key": "secret-of-mine"}}))
    async with serving(("decode",), api_keys=keys) as site, browser() as page:
        assert (await site.state())[0] == 401
        assert (await site.state("wrong"))[0] == 401
        assert (await site.state("secret-of-mine"))[0] == 200
        await page.go(f"{site.url}/ui")
        await page.until("document.querySelector('#login').checkVisibility()")
        assert "decode-" not in await page.text("#pools")
        await page.run("document.querySelector('#key').value = 'secret-of-mine'")
        await page.run("document.querySelector('#login button').click()")
        await page.until("document.querySelector('#pools').innerText.includes('decode-')")
        assert "secret" not in await page.run("document.documentElement.innerHTML")


async def test_what_the_page_answers() -> None:
    async with serving(("decode",)) as site:
        for path, kind in (
            ("/ui", "text/html"),
            ("/ui/app.js", "text/javascript"),
            ("/ui/style.css", "text/css"),
        ):
            with await asyncio.to_thread(urlopen, site.url + path) as reply:
                assert reply.headers["content-type"].startswith(kind)
                assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert (await asyncio.to_thread(_get, f"{site.url}/ui/../secret"))[0] == 404
        assert (await asyncio.to_thread(_get, f"{site.url}/ui/nothing"))[0] == 404
        status, state = await site.state()
        assert status == 200
        assert state["status"] == "degraded"
        assert any(text.startswith("prefill") for text in state["missing"])


async def test_top_shows_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as site:
        ask = await site.stack.run(site.stack.prompt(60))
        await until(lambda: any(link.load.handoffs for link in site.stack.dispatcher.roster.links("decode")))
        code = await asyncio.to_thread(top.run, TopConfig(endpoint=site.url, once=True, width=160))
        text = capsys.readouterr().out
        assert code == 0
        for worker in site.stack.workers:
            assert worker.worker_id in text
        assert ask.name.removesuffix("-0") in text
        assert "committed" in text
        assert "handed over" in text


def test_top_says_what_it_cannot_reach(capsys: pytest.CaptureFixture[str]) -> None:
    assert top.run(TopConfig(endpoint="http://127.0.0.1:9", once=True)) == 1
    assert "error: http://127.0.0.1:9" in capsys.readouterr().err


def test_top_draws_while_it_waits_for_an_answer() -> None:
    """A state that is missing, and one that says nothing."""
    stream = io.StringIO()
    top.draw(None, "connection refused", stream, 120)
    assert "connection refused" in stream.getvalue()


@pytest.mark.skipif("DELTASERVE_PICTURE" not in os.environ, reason="makes the picture for the documents")
async def test_picture() -> None:
    """Traffic of minutes in half a one: long and short prompts, a worker that is lost, one publish on its way."""
    roles = ("prefill", "prefill", "decode", "decode")
    async with serving(roles, placement="auto") as site, browser() as page:
        stack = site.stack
        await page.go(f"{site.url}/ui", 1440, 900)
        asks = []

        def lose_some(operation: str, key: str) -> None:
            if operation == "get" and len(asks) in (20, 40):
                stack.store.objects.pop(key, None)

        stack.store.before = lose_some
        for number in range(60):
            asks.append(stack.ask(stack.prompt((12, 300, 700, 1500, 60)[number % 5]), 24))
            await asyncio.sleep(0.3)
            if number == 45:  # when it holds nothing: the engine double resumes no request
                for ask in asks:
                    await stack.end(ask, 120)
                await stack.of("decode")[1].kill()
        for ask in asks:
            await stack.end(ask, 120)
        barrier = Barrier()

        def slow(operation: str, key: str) -> None:
            if key.endswith((f"/kda/{RANKS - 1}", "/kda/1")) and operation in ("reserve", "put"):
                barrier()

        stack.store.before = slow
        last = stack.ask(stack.prompt(1200), 24, extra_args={"kv_transfer_params": {"placement": "handover"}})
        await page.until("document.querySelectorAll('#boundaries .rank.busy').length === 2")
        picture = await page.screenshot()
        await asyncio.to_thread(Path(os.environ["DELTASERVE_PICTURE"]).write_bytes, picture)
        barrier.open()
        await stack.end(last)
