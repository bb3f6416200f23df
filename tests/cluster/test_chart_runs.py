# SPDX-License-Identifier: Apache-2.0
"""The chart's own command lines, variables, probes and hooks, on processes instead of pods.

Every container of the laptop example is started as it is rendered, on a loopback address in place of the pod's, in a
mount namespace with a read-only root and a /tmp of its own, as in the pod. Then what the kubelet would do: ask the
probes, and run the hooks while a request is being answered.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from deltaserve.up import binaries
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

    def start(self) -> None:
        """Start the container's process."""
        words = self.workload.container.get("command") or ENTRYPOINT.split()
        words = [
            {"etcd": str(binaries.find_etcd().path), "mooncake_master": str(binaries.find_master().path)}.get(
                w, w
            )
            for w in words
        ]
        argv = [*words, *(self._place(argument) for argument in self.workload.args)]
        if _may_mount():
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
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[dict[str, Pod]]:
    """The pods of the laptop example by component, none started; whatever runs at the end is ended."""
    values = changed(example("laptop-cpu"), "router.options", {"placement": "handover"})
    values = changed(values, "drain.propagationSeconds", 0)
    found = workloads(render(values))
    # Addresses of this process alone: the ports are the chart's, and another cluster may have them elsewhere.
    net = f"127.{20 + os.getpid() % 200}.{os.getpid() // 200 % 250}"
    addresses = {each.component: f"{net}.{10 + index}" for index, each in enumerate(found)}
    etcd, master = (next(w for w in found if w.component == c) for c in ("etcd", "master"))
    names = {
        f"{etcd.name}-0.{etcd.name}.{NAMESPACE}.svc": addresses["etcd"],
        f"$(POD_NAME).{etcd.name}.{NAMESPACE}.svc": addresses["etcd"],
        f"{master.name}.{NAMESPACE}.svc": addresses["master"],
        "/opt/deltaserve/models/demo": str(ROOT / "models" / "demo"),
        "/var/lib/etcd": "/tmp/etcd" if _may_mount() else str(tmp_path / "etcd"),
        "/cache": "/tmp/cache" if _may_mount() else str(tmp_path / "cache"),
    }
    mark = new_mark()
    made = {
        each.component: Pod(each, addresses[each.component], names, tmp_path / f"{each.component}.log", mark)
        for each in found
    }
    yield made
    for pod in made.values():
        if pod.process is not None and pod.process.poll() is None:
            pod.process.send_signal(signal.SIGKILL)
            pod.process.wait()
    wait_until(lambda: not marked(mark), 60, "every process of the test has ended")


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
        with closing(stream(endpoint, TOKENS)) as events:
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
