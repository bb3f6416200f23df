# SPDX-License-Identifier: Apache-2.0
"""The life of a cluster with doubles for roles: start, stop, deaths, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from deltaserve.up import Cluster, ClusterError
from deltaserve.up.process import Child
from tests.support.patience import HUNG
from tests.support.processes import marked, wait_until

pytestmark = pytest.mark.cluster
Make = Callable[..., Cluster]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def _nothing_left(mark: str, folder: Path) -> bool:
    return not marked(mark) and not list(folder.iterdir())


def test_start_serves_and_stop_leaves_nothing(
    make_cluster: Make, mark: str, temporary: Path, tmp_path: Path
) -> None:
    cluster = make_cluster(prefill=2, decode=1)
    cluster.start()
    assert list(cluster.pids) == ["etcd", "master", "prefill-0", "prefill-1", "decode-0", "router"]
    assert urllib.request.urlopen(cluster.endpoint, timeout=5).status == 200
    addresses = [status.address for status in cluster.statuses.values()]
    assert all(_listens(address) for address in addresses)
    # Each double has two ranks that ignore SIGTERM, one of them in a session of its own: the check below sees them.
    assert len(marked(mark)) >= 6 + 2 * 4
    assert list(temporary.iterdir())
    began = time.monotonic()
    cluster.stop()
    assert time.monotonic() - began < HUNG
    assert not marked(mark)
    assert not any(_listens(address) for address in addresses)
    assert not list(temporary.iterdir())
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "decode-0.log",
        "etcd.log",
        "master.log",
        "prefill-0.log",
        "prefill-1.log",
        "router.log",
    ]


def test_stages_are_told_in_order(make_cluster: Make) -> None:
    cluster = make_cluster()
    cluster.start()
    texts = [event.text for event in cluster.events if event.name == "decode-0"]  # type: ignore[attr-defined]
    assert texts == ["starting", "loading the model", "ready"]


def test_a_process_that_ignores_sigterm_is_killed_in_time(
    make_cluster: Make, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DECODE", "stubborn")
    cluster = make_cluster(stop_timeout=1.0)
    cluster.start()
    began = time.monotonic()
    cluster.stop()
    assert 1.0 <= time.monotonic() - began < HUNG
    assert not marked(mark)


def test_a_stopped_process_ends_too(make_cluster: Make, mark: str) -> None:
    cluster = make_cluster()
    cluster.start()
    cluster.kill("decode-0", signal.SIGSTOP)
    cluster.stop()
    assert not marked(mark)


def test_a_worker_that_dies_while_starting_tears_down_and_shows_its_log(
    make_cluster: Make, mark: str, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    monkeypatch.setenv("FAKE_PREFILL", "die")
    cluster = make_cluster()
    with pytest.raises(
        ClusterError, match=r"prefill-0: no memory for the KV cache; lower .*prefill-0\.log"
    ) as caught:
        cluster.start()
    assert "a line of context" in caught.value.log_tail
    assert _nothing_left(mark, temporary)


def test_a_process_that_is_late_is_named_with_its_stage(
    make_cluster: Make, mark: str, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    monkeypatch.setenv("FAKE_DECODE", "hang_start")
    with pytest.raises(ClusterError, match="decode-0: not ready after 10 s, it is at: loading the model"):
        make_cluster(start_timeout=10.0, stop_timeout=0.5).start()
    assert _nothing_left(mark, temporary)


@pytest.mark.parametrize("name", ["decode-0", "router", "etcd", "master"])
def test_what_dies_in_service_comes_back_on_the_same_address(make_cluster: Make, name: str) -> None:
    cluster = make_cluster()
    cluster.start()
    before = cluster.statuses[name]
    cluster.kill(name)
    after = cluster.wait_ready(name, timeout=15, after_start=1)
    assert after.starts == 2
    assert after.pid != before.pid
    if name != "decode-0":
        assert after.address == before.address
        assert _listens(after.address)
    texts = [event.text for event in cluster.events if event.name == name]  # type: ignore[attr-defined]
    assert "killed by SIGKILL; starts again in 0.5 s" in texts


def test_a_dead_worker_s_ranks_go_before_it_comes_back(make_cluster: Make, mark: str) -> None:
    cluster = make_cluster()
    cluster.start()
    count = len(marked(mark))
    os.kill(cluster.pids["decode-0"], signal.SIGKILL)
    cluster.wait_ready("decode-0", timeout=15, after_start=1)
    # The rank that opened its own session outlives its worker and is ended with the cluster.
    assert len(marked(mark)) <= count + 1


def test_a_process_is_given_up_after_so_many_restarts(make_cluster: Make, tmp_path: Path) -> None:
    cluster = make_cluster(max_restarts=1)
    cluster.start()
    os.kill(cluster.pids["decode-0"], signal.SIGKILL)
    cluster.wait_ready("decode-0", timeout=15, after_start=1)
    os.kill(cluster.pids["decode-0"], signal.SIGKILL)
    wait_until(lambda: cluster.statuses["decode-0"].state == "failed", 30, "given up")
    assert cluster.statuses["decode-0"].stage == "given up after 1 restarts: killed by SIGKILL"
    assert cluster.statuses["router"].state == "ready"
    cluster.restart("decode-0")
    cluster.wait_ready("decode-0", timeout=15, after_start=2)


def test_held_stays_away_until_restart(make_cluster: Make) -> None:
    cluster = make_cluster()
    cluster.start()
    address = cluster.etcd_endpoint
    cluster.kill("etcd", hold=True)
    assert not _listens(address)
    time.sleep(1.0)
    assert cluster.statuses["etcd"].state == "held"
    cluster.restart("etcd")
    cluster.wait_ready("etcd", timeout=10, after_start=1)
    assert _listens(address)
    with pytest.raises(KeyError, match="no process 'decode-7'"):
        cluster.kill("decode-7")


def test_shared_memory_of_a_killed_process_goes(make_cluster: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DECODE", "shm")
    cluster = make_cluster()
    cluster.start()
    path = Path(f"/dev/shm/deltaserve-fake-{cluster.pids['decode-0']}")
    assert path.exists()
    cluster.stop()
    assert not path.exists()


def test_nothing_starts_when_the_port_is_taken(make_cluster: Make, mark: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        cluster = make_cluster(port=server.getsockname()[1])
        with pytest.raises(
            ClusterError, match=r"is taken by .*; stop what holds it, or choose another with --port"
        ):
            cluster.start()
    assert not marked(mark)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "cannot read config.json"),
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", '{"model_type": "llama"}', "llama is not a hybrid"),
        ("tokenizer.json", None, "has no tokenizer"),
        ("model.safetensors", None, "no .*safetensors weights"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(
    make_cluster: Make, model: Path, name: str, content: str | None, message: str
) -> None:
    (model / name).unlink()
    if content is not None:
        (model / name).write_text(content)
    with pytest.raises(ClusterError, match=message):
        make_cluster().start()


def test_a_run_folder_that_takes_no_files_is_refused(
    make_cluster: Make, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Read-only file system")

    heard: list[Path] = []
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", refuse)
        cluster = make_cluster(on_folder=heard.append)
        with pytest.raises(ClusterError, match=r"run folder .*run: Read-only file system; .*--run-dir"):
            cluster.start()
    assert not marked(mark)
    assert not heard
    make_cluster(on_folder=heard.append, stop_timeout=0.5).start()
    assert heard == [tmp_path / "run"]


def test_a_user_without_a_home_needs_none(make_cluster: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    # torch sets the second in whichever process imports its compiler, and a test before this one may have.
    for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    cluster = make_cluster(stop_timeout=0.5).start()
    environ = Path(f"/proc/{cluster.pids['router']}/environ").read_bytes().decode()
    variables = dict(line.partition("=")[::2] for line in environ.split("\0"))
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == f"{variables['TMPDIR']}/inductor"


def test_a_missing_model_folder_is_refused(make_cluster: Make) -> None:
    with pytest.raises(ClusterError, match=r"/no/such: no such folder; .*--model"):
        make_cluster(model="/no/such").start()


def test_a_defect_in_the_supervisor_leaves_nothing(
    make_cluster: Make, mark: str, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    def broken(self: Child) -> int | None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Child, "poll", broken)
    with pytest.raises(ClusterError, match="supervisor: RuntimeError: a defect"):
        make_cluster(stop_timeout=0.5).start()
    assert _nothing_left(mark, temporary)
