# SPDX-License-Identifier: Apache-2.0
"""The chart's own command lines, variables, probes and hooks, on processes instead of pods.

Every container of the laptop example is started as it is rendered, on a loopback address in place of the pod's, in a
mount namespace with a read-only root and a /tmp of its own, as in the pod. Then what the kubelet would do: ask the
probes, and run the hooks while a request is being answered.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltaserve.config import EtcdConfig
from deltaserve.etcd_channel import EtcdUnavailable
from deltaserve.etcd_client import Etcd
from deltaserve.up import binaries, ports
from tests.support.pki import make_certificates
from tests.support.processes import MARK, marked, new_mark, wait_until
from tests.unit.deploy.rendering import CHART, NAMESPACE, ROOT, Workload, changed, example, render, workloads

pytestmark = pytest.mark.cluster

TOKENS = 400
"""Of the answer that goes on while its worker is told to leave: some 15 s on two cores."""
ENTRYPOINT = f"{sys.executable} -m deltaserve"
READ_ONLY = (
    "mount --make-rprivate / && mount --bind / / && mount -t tmpfs none /tmp && mount -o remount,bind,ro / && "
    "! touch /read-only-or-not 2>/dev/null && cd / && exec "
)
"""The file system of a container. Needs root, which a test has in CI; elsewhere the file system is as it is."""


class Pod:
    """One container as a process."""

    def __init__(self, workload: Workload, address: str, names: dict[str, str], log: Path, mark: str) -> None:
        self.workload, self.address, self.log = workload, address, log
        self._names = {**names, "$(POD_IP)": address, "$(POD_NAME)": f"{workload.name}-0", "0.0.0.0": address}
        variables = {
            name: self._place(str(each.get("value", address if name == "POD_IP" else "")))
            for name, each in workload.env.items()
            if name != "POD_NAME"
        }
        self.environ = {**os.environ, **variables, "PYTHONPATH": str(ROOT), MARK: mark}
        self.process: subprocess.Popen[bytes] | None = None

    def _place(self, text: str) -> str:
        for name, value in self._names.items():
            text = text.replace(name, value)
        return text

    def start(self, private: bool = True) -> None:
        """Start the container's process; `private`: with a file system of its own."""
        words = self.workload.container.get("command") or ENTRYPOINT.split()
        words = [
            {"etcd": str(binaries.find_etcd().path), "mooncake_master": str(binaries.find_master().path)}.get(
                w, w
            )
            for w in words
        ]
        argv = [*words, *(self._place(argument) for argument in self.workload.args)]
        if private and _may_mount():
            argv = ["unshare", "--mount", "sh", "-c", READ_ONLY + '"$@"', "sh", *argv]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=self.environ
            )

    def probe(self, kind: str) -> bool:
        """What the kubelet would hear: startup, liveness or readiness."""
        probe = self.workload.container[f"{kind}Probe"]
        asked = probe.get("httpGet") or probe["tcpSocket"]
        port = self.workload.ports[asked["port"]]
        url = f"http://{self.address}:{port}{asked.get('path', '/health')}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return 200 <= answer.status < 400
        except urllib.error.HTTPError:
            return "tcpSocket" in probe
        except OSError:
            return False

    def wait(self, kind: str, expected: bool = True) -> None:
        """Wait until a probe says `expected`; the log in the message when it does not, or the process ends."""

        def said() -> bool:
            assert self.process is not None
            ended = self.process.poll()
            assert ended is None, f"{self.workload.name} ended with {ended}:\n{self.text()[-3000:]}"
            return self.probe(kind) is expected

        try:
            wait_until(said, 240, f"{self.workload.name}: {kind}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()[-3000:]}") from error

    def hook(self) -> subprocess.Popen[bytes]:
        """Run the preStop hook."""
        command = self.workload.container["lifecycle"]["preStop"]["exec"]["command"]
        place = {
            "python": sys.executable,
            "/etc/deltaserve/scripts": str(CHART / "files"),
            "127.0.0.1": self.address,
        }
        words = [str(word) for word in command]
        if words[0] == "sh":
            words = [word.replace("exec deltaserve", f"exec {ENTRYPOINT}") for word in words]
        else:
            for name, value in place.items():
                words = [word.replace(name, value) for word in words]
        return subprocess.Popen(words, env=self.environ, cwd=ROOT)

    def text(self) -> str:
        """What it has written."""
        return self.log.read_text(errors="replace")


def _may_mount() -> bool:
    if any(path.is_relative_to("/tmp") for path in (ROOT, Path(sys.executable))):
        return False  # a /tmp of its own would hide this project from the process
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return done.returncode == 0


def _net() -> str:
    """Loopback addresses of this process alone: the ports are the chart's, and another cluster may have them."""
    return f"127.{20 + os.getpid() % 200}.{os.getpid() // 200 % 250}"


def _names(found: list[Workload], addresses: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """What stands in a rendered command line → what it is here."""
    etcd, master = (next(w for w in found if w.component == c) for c in ("etcd", "master"))
    return {
        f"{etcd.name}-0.{etcd.name}.{NAMESPACE}.svc": addresses["etcd"],
        f"$(POD_NAME).{etcd.name}.{NAMESPACE}.svc": addresses["etcd"],
        f"{master.name}.{NAMESPACE}.svc": addresses["master"],
        "/opt/deltaserve/models/demo": str(ROOT / "models" / "demo"),
        "/var/lib/etcd": "/tmp/etcd" if _may_mount() else str(tmp_path / "etcd"),
        "/cache": "/tmp/cache" if _may_mount() else str(tmp_path / "cache"),
    }


@contextlib.contextmanager
def _ended(pods: list[Pod], mark: str) -> Iterator[None]:
    """Whatever runs at the end is ended."""
    try:
        yield
    finally:
        for pod in pods:
            if pod.process is not None and pod.process.poll() is None:
                pod.process.send_signal(signal.SIGKILL)
                pod.process.wait()
        wait_until(lambda: not marked(mark), 60, "every process of the test has ended")


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[dict[str, Pod]]:
    """The pods of the laptop example by component, none started."""
    values = changed(example("laptop-cpu"), "router.options", {"placement": "handover"})
    found = workloads(render(changed(values, "drain.propagationSeconds", 0)))
    addresses = {each.component: f"{_net()}.{10 + index}" for index, each in enumerate(found)}
    names, mark = _names(found, addresses, tmp_path), new_mark()
    made = {
        each.component: Pod(each, addresses[each.component], names, tmp_path / f"{each.component}.log", mark)
        for each in found
    }
    with _ended(list(made.values()), mark):
        yield made


def stream(endpoint: str, tokens: int) -> Iterator[dict[str, Any]]:
    """Events of a completion that goes on for exactly `tokens` tokens."""
    body = {
        "model": "demo",
        "prompt": "<kv>" + "".join(f" {i} = {i} ;" for i in range(60)) + " 7 ?",
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{endpoint}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=240) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def test_pods_start_answer_and_leave(pods: dict[str, Pod]) -> None:
    etcd, master, router = pods["etcd"], pods["master"], pods["router"]
    prefill, decode = pods["prefill"], pods["decode"]
    for pod in (etcd, master):
        pod.start()
    for pod in (etcd, master):
        pod.wait("readiness")
        assert pod.probe("liveness")

    router.start()
    router.wait("startup")
    assert router.probe("liveness")
    assert not router.probe("readiness")  # alive, but there is no decode worker: no request may come here yet

    for pod in (prefill, decode):
        pod.start()
    for pod in (prefill, decode, router):
        pod.wait("readiness")
        assert pod.probe("liveness")

    endpoint = f"http://{router.address}:{router.workload.ports['http']}"
    texts: list[str] = []
    errors: list[dict[str, Any]] = []
    begun = threading.Event()

    def read() -> None:
        with contextlib.closing(stream(endpoint, TOKENS)) as events:
            for event in events:
                if "error" in event:
                    errors.append(event)
                else:
                    texts.append(event["choices"][0]["text"])
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(240)
    # The worker is told to go while it answers, and the router too.
    leaving, idle = decode.hook(), router.hook()
    decode.wait("readiness", expected=False)
    assert decode.probe("liveness")  # a worker that drains must not be restarted
    reader.join(240)
    assert not errors
    assert len(texts) >= TOKENS // 8  # several tokens may come in one event, all of them have come
    assert leaving.wait(240) == 0
    assert decode.process is not None
    assert decode.process.wait(60) == 0, decode.text()[-3000:]
    assert idle.wait(240) == 0
    for pod in (prefill, router):
        assert pod.process is not None
        pod.process.send_signal(signal.SIGTERM)
        assert pod.process.wait(60) == 0, pod.text()[-3000:]


def test_masters_elect_a_leader_and_followers_are_ready(tmp_path: Path) -> None:
    values = changed(example("laptop-cpu"), "master.replicas", 2)
    found = workloads(render(values))
    etcd, master = (next(w for w in found if w.component == c) for c in ("etcd", "master"))
    addresses = {"etcd": f"{_net()}.20", "master": ""}
    names, mark = _names(found, addresses, tmp_path), new_mark()
    register = Pod(etcd, addresses["etcd"], names, tmp_path / "etcd.log", mark)
    masters = [Pod(master, f"{_net()}.{21 + n}", names, tmp_path / f"master{n}.log", mark) for n in range(2)]

    def roles() -> list[str]:
        found = []
        for pod in masters:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://{pod.address}:9003/role", timeout=10) as said,
            ):
                found.append(said.read().decode())
        return sorted(found)

    with _ended([register, *masters], mark):
        register.start()
        register.wait("readiness")
        for pod in masters:
            pod.start()
        wait_until(lambda: roles() == ["leader", "standby"], 60, "one master leads, the other follows")
        assert all(pod.probe("readiness") and pod.probe("liveness") for pod in masters)
        # The leader goes: the follower leads, under its own address.
        leader = next(pod for pod in masters if f'"leader_address":"{pod.address}:50051"' in _health(pod))
        assert leader.process is not None
        leader.process.kill()
        leader.process.wait()
        wait_until(lambda: roles() == ["leader"], 120, "the follower leads")


def _health(pod: Pod) -> str:
    with urllib.request.urlopen(f"http://{pod.address}:9003/health", timeout=10) as answer:
        return str(answer.read().decode())


async def test_the_bundled_etcd_speaks_tls_and_is_probed_without(tmp_path: Path) -> None:
    values = changed(example("laptop-cpu"), "etcd.tlsSecret", "client")
    found = workloads(render(changed(values, "etcd.serverTlsSecret", "server")))
    # The certificates of the tests are for this address.
    addresses = {"etcd": "127.0.0.1", "master": ""}
    folder = make_certificates(tmp_path, "client")
    secret = {"tls.crt": "server.pem", "tls.key": "server.key", "ca.crt": "ca.pem"}
    names = _names(found, addresses, tmp_path) | {
        "/var/lib/etcd": str(tmp_path / "etcd"),
        **{f"/etc/etcd/tls/{key}": str(folder / file) for key, file in secret.items()},
    }
    client, peer, metrics = ports.choose(3)
    names |= {":2379": f":{client}", ":2380": f":{peer}", ":2381": f":{metrics}"}
    mark = new_mark()
    (etcd,) = [each for each in found if each.component == "etcd"]
    etcd.container["ports"] = [{"name": "metrics", "containerPort": metrics}]
    pod = Pod(etcd, "127.0.0.1", names, tmp_path / "etcd.log", mark)
    with _ended([pod], mark):
        pod.start(private=False)
        pod.wait("readiness")
        assert pod.probe("liveness")
        mine = EtcdConfig(
            endpoints=[f"127.0.0.1:{client}"],
            ca_cert=folder / "ca.pem",
            client_cert=folder / "client.pem",
            client_key=folder / "client.key",
        )
        member = Etcd(mine)
        assert await member.server_version()
        await member.close()
        stranger = Etcd(mine.model_copy(update={"client_cert": None, "client_key": None}))
        with pytest.raises(EtcdUnavailable):
            await stranger.server_version()
        await stranger.close()
