# SPDX-License-Identifier: Apache-2.0
"""What `--processes N` needs before the processes part: checks, sockets, a folder."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from deltaserve.config import RouterConfig
from router.admission.keys import KeyRing
from router.errors import CannotServe, Failed

if TYPE_CHECKING:
    from router.processes.place import Place

STORE = "VLLM_ENABLE_RESPONSES_API_STORE"


def check(config: RouterConfig, check_tls: Callable[[RouterConfig], None]) -> None:
    """Raises Failed for what several processes cannot do, and as `check_tls` does."""
    if os.environ.get(STORE, "0") not in ("", "0"):
        raise Failed(
            f"processes {config.processes}: {STORE} keeps responses in the memory of one process, and another one "
            "would not find them; unset it, or set processes to 1"
        )
    # gRPC begins threads when it reads a certificate, and a process with threads cannot be forked.
    _in_a_child(lambda: check_tls(config))


def listen(config: RouterConfig, make: Callable[[RouterConfig, bool], socket.socket]) -> list[socket.socket]:
    """The port's sockets, one a process. Raises as `make` does."""
    # Somebody else's port could be shared without a word: so it must have been free for one alone.
    alone = make(config, False)
    port = alone.getsockname()[1]
    alone.close()
    config = config.model_copy(update={"port": port})
    made: list[socket.socket] = []
    try:
        for _ in range(config.processes):
            made.append(make(config, True))
    except BaseException:
        for listener in made:
            listener.close()
        raise
    return made


def serve(
    config: RouterConfig,
    listeners: list[socket.socket],
    child: Callable[[Place, RouterConfig], int],
    announce: Callable[[], None],
) -> None:
    """Fork the processes and return when they have ended. Raises Failed when they cannot go on, or CannotServe."""
    from router.processes.parent import Parent

    keys = KeyRing.read(config.api_keys) if config.api_keys else KeyRing()
    with contextlib.ExitStack() as stack:
        rust = stack.enter_context(_rust(config))
        if config.grpc_port >= 0:
            reserved = stack.enter_context(_reserved(config))
            config = config.model_copy(update={"grpc_port": reserved.getsockname()[1]})
            print(f"GRPC {config.host}:{config.grpc_port}", flush=True)
        folder = Path(tempfile.mkdtemp(prefix="deltaserve-router-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            raise Failed(
                f"processes {config.processes}: {threads} threads run before the processes part; set processes to 1"
            )
        gc.collect()
        gc.freeze()  # a collection would write to every page that the processes share
        reason = Parent(lambda place: child(place, config), announce, listeners, keys, folder, rust).run()
    if reason:
        raise Failed(reason)


@contextlib.contextmanager
def _rust(config: RouterConfig) -> Iterator[socket.socket | None]:
    """The Rust front end's own port, for all of them: whoever is free accepts."""
    if not config.rust_port:
        yield None
        return
    from router.app import rust_listener

    try:
        listener = rust_listener(config.host, config.rust_port)
    except CannotServe as error:
        raise Failed(str(error)) from error
    with listener:
        yield listener


@contextlib.contextmanager
def _reserved(config: RouterConfig) -> Iterator[socket.socket]:
    """A socket that holds the gRPC port, and is never connected to: the processes listen there themselves."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    port = config.grpc_port
    try:
        with socket.socket(family) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind((config.host, port))
            port = alone.getsockname()[1]
        held = socket.socket(family)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((config.host, port))
    except OSError as error:
        raise Failed(
            f"grpc_port {port}: {config.host}:{port} cannot be bound ({error.strerror}); "
            "choose another with --grpc-port"
        ) from error
    with held:
        yield held


def _in_a_child(check: Callable[[], None]) -> None:
    """Raise Failed with the words of a check that fails in a forked process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        words = ""
        try:
            check()
        except BaseException as error:
            words = str(error) or type(error).__name__
        os.write(writer, words.encode()[:4096])
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        words = file.read().decode()
    os.waitpid(pid, 0)
    if words:
        raise Failed(words)
