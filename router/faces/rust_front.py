# SPDX-License-Identifier: Apache-2.0
"""Face two: vLLM's Rust front end (`vllm-rs`) as a child of the router, over a virtual engine core.

    client ─▶ gateway ─▶ plain completions and chats ─▶ vllm-rs (Unix socket) ─▶ virtual core ─▶ dispatcher
                      └▶ everything else, and all while vllm-rs is away ─▶ face one
    client ─▶ rust_port, when there is one ─▶ vllm-rs ─▶ ...: no byte passes through Python, and no gateway either

Start: listen on the sockets, start vllm-rs with them, connect the virtual core, wait until it answers. Crash: it is
started again after a pause that doubles; its requests have been aborted, and face one answers meanwhile. Stop: SIGTERM,
then SIGKILL.

Decisions. The program is found in `rust_binary`, or where vLLM's CUDA wheel has put it. With `rust_port` its listener
is that TCP port, which the gateway uses as well; without, a Unix socket in a folder that only this user may enter. The
child ends with the router, however that ends (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from router.errors import CannotServe
from router.faces.virtual_core import Dispatch, VirtualCore

log = logging.getLogger(__name__)

VLLM_VERSION = "0.33.0"
"""The release whose front end this is written for."""
BACKLOG = 2048
READY_SECONDS = 60.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
STOP_SECONDS = 2.0


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _end_with_the_router() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class RustMissing(CannotServe):
    """There is no front end to start; the message says where it was looked for, and the remedy."""


def find(binary: Path | None) -> Path:
    """The program. Raises RustMissing."""
    if binary is not None:
        if not binary.is_file() or not os.access(binary, os.X_OK):
            raise RustMissing(
                f"rust_binary {binary}: is no program; give the path of vllm-rs with --rust-binary"
            )
        return binary.resolve()
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        program = Path(folder) / "vllm-rs"
        if program.is_file():
            return program
    raise RustMissing(
        f"front rust: this vLLM brings no vllm-rs; it is in the CUDA wheel of vllm {VLLM_VERSION}: "
        "give its path with --rust-binary, or take --front python"
    )


def command(
    program: Path, http_fd: int, input_fd: int, output_fd: int, model: Path, name: str, max_model_len: int
) -> list[str]:
    """The command line; the descriptors are those of listening sockets that the child inherits."""
    arguments = {
        "model_tag": str(model),
        "served_model_name": [name],
        "max_model_len": max_model_len,
        "enable_prompt_tokens_details": True,
    }
    return [
        str(program),
        "frontend",
        *("--listen-fd", str(http_fd)),
        *("--input-listener-fd", str(input_fd)),
        *("--output-listener-fd", str(output_fd)),
        *("--args-json", json.dumps(arguments)),
    ]


class RustFront:
    """See the module's description. `start` and `close` frame its life, on one event loop."""

    def __init__(
        self,
        program: Path,
        dispatch: Dispatch,
        *,
        model: Path,
        name: str,
        max_model_len: int,
        listener: socket.socket | None = None,
    ) -> None:
        """`listener`: where it shall answer clients by itself; None: only this process reaches it."""
        self.ready = False
        """True while it answers."""
        self.restarts = 0
        self._program, self._dispatch = program, dispatch
        self._model, self._name, self._max_model_len = model, name, max_model_len
        self._listener = listener
        self._folder = Path(tempfile.mkdtemp(prefix="deltaserve-rust-"))
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin. It is `ready` some seconds later."""
        if self._listener is None:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(self._folder / "http"))
            self._listener.listen(BACKLOG)
        self._task = asyncio.create_task(self._supervise(), name="vllm-rs")

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to it. Raises OSError."""
        assert self._listener is not None
        if self._listener.family == socket.AF_UNIX:
            return await asyncio.open_unix_connection(self._listener.getsockname())
        host, port = self._listener.getsockname()[:2]
        return await asyncio.open_connection({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)

    @property
    def pid(self) -> int:
        """The child's; 0: none runs."""
        return self._process.pid if self._process is not None else 0

    async def close(self) -> None:
        """Stop it. Never raises."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _supervise(self) -> None:
        pause = FIRST_PAUSE
        while True:
            began = asyncio.get_running_loop().time()
            try:
                await self._live()
            except OSError as error:
                log.error("vllm-rs: cannot be started: %s", error)
            if asyncio.get_running_loop().time() - began > LONGEST_PAUSE:
                pause = FIRST_PAUSE
            self.restarts += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _live(self) -> None:
        """From its start to its end."""
        with contextlib.ExitStack() as stack:
            paths = [self._folder / "input", self._folder / "output"]
            inner = [stack.enter_context(_unix_listener(path)) for path in paths]
            assert self._listener is not None
            fds = (self._listener.fileno(), inner[0].fileno(), inner[1].fileno())
            arguments = command(self._program, *fds, self._model, self._name, self._max_model_len)
            process = self._process = await asyncio.create_subprocess_exec(
                *arguments, pass_fds=fds, stdin=subprocess.DEVNULL, preexec_fn=_end_with_the_router
            )
        core = VirtualCore(
            self._dispatch,
            *(f"ipc://{path}" for path in paths),
            max_model_len=self._max_model_len,
            vllm_version=VLLM_VERSION,
        )
        ended = asyncio.ensure_future(process.wait())
        try:
            core.start()
            self.ready = await self._answers(ended)
            if self.ready:
                log.info("vllm-rs serves, as process %d", process.pid)
            await asyncio.shield(ended)
            log.error("vllm-rs ended with code %d; face one answers until it is back", process.returncode)
        finally:
            self.ready = False
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await asyncio.wait({ended}, timeout=STOP_SECONDS)
            if not ended.done():
                process.kill()
                await asyncio.wait({ended}, timeout=STOP_SECONDS)
            await core.close()
            self._process = None

    async def _answers(self, ended: asyncio.Future[int]) -> bool:
        """True once it answers; False when it has ended."""
        end = asyncio.get_running_loop().time() + READY_SECONDS
        while not ended.done() and asyncio.get_running_loop().time() < end:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(2.0):
                    reader, writer = await self.connect()
                    try:
                        writer.write(b"GET /health HTTP/1.1\r\nhost: rust\r\nconnection: close\r\n\r\n")
                        if (await reader.readline()).split()[1:2] == [b"200"]:
                            return True
                    finally:
                        writer.close()
            await asyncio.sleep(0.1)
        return False


@contextlib.contextmanager
def _unix_listener(path: Path) -> Iterator[socket.socket]:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield listener
