# SPDX-License-Identifier: Apache-2.0
"""The cluster as Ray actors on a real Ray of two nodes: it grows and shrinks, an actor dies, a node is lost.

Traffic runs all the time. No request may fail, and every answer must be the one that the small, quiet cluster gave in
the beginning. That the changes really happened shows in who served: traces name the workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deltaserve.plan_config import PlanConfig
from deltaserve.up.errors import ClusterError
from deltaserve.up.ports import choose
from deltaserve.verify.prompts import PromptMaker
from deploy.planner.main import plan
from deploy.ray.cluster import RayCluster
from deploy.ray.config import RayConfig
from tests.cluster.calls import call, complete
from tests.support.cluster import DEMO
from tests.support.processes import wait_until

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

HEAD, SECOND = "127.0.0.2", "127.0.0.3"
STORE = 80 << 20
"""Bytes of a node's object store: Ray's least. Nothing of ours goes through it."""
PATIENCE = 240.0
MAKER = PromptMaker(DEMO)
PROMPTS = [list(MAKER.make(length).tokens) for length in (300, 420, 530)]
SAMPLING: list[dict[str, Any]] = [{}, {}, {"temperature": 1.0, "seed": 7}]
TOKENS = 100


@dataclass
class Target:
    """What `calls.complete` needs of a cluster."""

    endpoint: str
    served_model_name: str = DEMO.name


@dataclass
class Nodes:
    """Ray, its second node, and the cluster on it."""

    ray: Any
    second: Any
    cluster: RayCluster
    target: Target


def ask(target: Target, number: int, salt: str) -> dict[str, Any]:
    """One of the requests, handed over, with a prompt that no cache knows. Raises AssertionError when it fails."""
    return complete(
        target,  # type: ignore[arg-type]
        PROMPTS[number],
        max_tokens=TOKENS,
        cache_salt=salt,
        **SAMPLING[number],
    )


@dataclass
class Traffic:
    """Four clients, so that every decode worker has something to do; each sends one request after another."""

    target: Target
    right: list[list[int]]
    answers: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Traffic:
        self._threads = [threading.Thread(target=self._send, args=(client,)) for client in range(4)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def _send(self, client: int) -> None:
        number = client
        while not self._stop.is_set():
            number += 1
            which = number % len(PROMPTS)
            try:
                answer = ask(self.target, which, f"{id(self)}-{client}-{number}")
                self.answers.append({**answer, "right": answer["tokens"] == self.right[which]})
            except Exception as error:  # whatever it is, it is a failed request
                self.errors.append(f"{type(error).__name__}: {error}")

    def mark(self) -> int:
        """Where the answers are now."""
        return len(self.answers)

    def wait_for(self, number: int, since: int) -> None:
        """Until so many more answers have come."""
        wait_until(lambda: len(self.answers) >= since + number, PATIENCE, f"{number} more answers")

    def served_by(self, since: int) -> set[str]:
        """Workers that answers since then came from."""
        return {word for a in self.answers[since:] for word in a["trace"]["route"].split() if "-" in word}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A Ray whose first node holds the control plane and one worker of each role, the second one more of each."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    rooms = {"deltaserve_prefill": 1, "deltaserve_decode": 1}
    common = {"num_cpus": 4, "object_store_memory": STORE, "include_dashboard": False}
    made = Cluster(
        initialize_head=True,
        head_node_args={**common, "node_ip_address": HEAD, "resources": {**rooms, "deltaserve_control": 1}},
    )
    try:
        second = made.add_node(**common, node_ip_address=SECOND, resources=rooms)
        config = RayConfig(
            name="test",
            address=made.address,
            model=DEMO,
            max_model_len=2048,
            max_num_seqs=4,
            kv_cache_bytes=256 << 20,
            segment_bytes=256 << 20,
            router_options={"resume_wait": 200.0},
            log_dir=tmp_path_factory.mktemp("ray"),
        )
        ray.init(address=made.address, log_to_driver=False, logging_level="warning", _node_ip_address=HEAD)
        cluster = RayCluster.start(config)
        try:
            cluster.wait_ready(config.start_timeout)
            yield Nodes(made, second, cluster, Target(cluster.endpoint))
        finally:
            cluster.stop()
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture(scope="module")
def right(nodes: Nodes) -> list[list[int]]:
    """The answers of the quiet cluster; each handed over whole."""
    answers = [ask(nodes.target, number, "right") for number in range(len(PROMPTS))]
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        assert answer["trace"]["from_store"] == len(prompt) - 1, answer["trace"]
    tokens = [answer["tokens"] for answer in answers]
    assert len({tuple(each) for each in tokens}) == len(tokens), "the control: answers do differ"
    return tokens


def settle(nodes: Nodes, what: str) -> None:
    """Until every role has exactly the workers that are wanted; a failure has all states in words."""
    try:
        nodes.cluster.wait_ready(PATIENCE)
    except ClusterError as error:
        raise AssertionError(f"{what}: {error}") from error


def kill_busy(nodes: Nodes, replica: dict[str, Any]) -> None:
    """Kill a decode worker that certainly has requests: it is held still first, so that they cannot end meanwhile."""

    def requests() -> int:
        """What the router has there now; what a worker says of itself is up to a second old."""
        workers = call(f"{nodes.target.endpoint}/health")[1]["roles"]["decode"]["workers"]
        return sum(worker["requests"] for worker in workers if worker["address"] == replica["address"])

    def held() -> bool:
        if not requests():
            return False
        os.killpg(replica["pid"], signal.SIGSTOP)
        time.sleep(0.2)  # for what it had sent before
        if requests():
            return True
        os.killpg(replica["pid"], signal.SIGCONT)
        return False

    wait_until(held, PATIENCE, f"{replica['address']} has requests")
    kill_group(replica["pid"])


def resumed(traffic: Traffic) -> int:
    """Answers that another worker went on with."""
    return sum(
        answer["trace"]["resumes"] > 0 or answer["trace"]["attempts"] > 1 for answer in traffic.answers
    )


def kill_group(pid: int) -> None:
    """SIGKILL to a worker and its ranks: nothing of it can say good-bye."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def planning(nodes: Nodes, folder: Path, highest: int) -> Iterator[Callable[[], str]]:
    """`deltaserve plan --ray` beside the cluster; yields what reads its page of metrics.

    Workers of this profile are so quick, and the promises so long, that prefill needs one whatever happens, and decode
    its reserve beside the one that works.
    """
    profile = {
        **{"prefill_fixed": 1e-3, "prefill_token": 1e-6, "handoff_fixed": 1e-3, "step_fixed": 1e-3},
        **{
            "step_sequence": 1e-4,
            "step_context": 0.0,
            "slots": 4,
            "kv_tokens": 100_000,
            "start_seconds": 60.0,
        },
    }
    file = folder / "profile.json"
    file.write_text(json.dumps(profile), encoding="utf-8")
    (port,) = choose(1)
    config = PlanConfig(
        routers=[nodes.target.endpoint],
        profile=file,
        ttft=1000.0,
        tpot=10.0,
        interval=1.0,
        highest=highest,
        port=port,
        ray=nodes.cluster.name,
        ray_address=nodes.ray.address,
    )
    stop, codes = threading.Event(), list[int]()
    thread = threading.Thread(target=lambda: codes.append(plan(config, stop)))
    thread.start()

    def page() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as reply:
            return str(reply.read().decode())

    try:
        yield page
    finally:
        stop.set()
        thread.join(PATIENCE)
    assert codes == [0]


def test_a_role_keeps_at_least_one_worker(nodes: Nodes) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        nodes.cluster.scale("decode", 0)
    with pytest.raises(ClusterError, match="no such cluster"):
        RayCluster.attach("another", nodes.ray.address)


def test_it_grows_shrinks_and_heals_under_traffic(nodes: Nodes, right: list[list[int]]) -> None:
    cluster = nodes.cluster
    with Traffic(nodes.target, right) as traffic:
        # Both roles to two, on the second node.
        cluster.scale("decode", 2)
        cluster.scale("prefill", 2)
        settle(nodes, "two workers a role")
        since = traffic.mark()
        wait_until(lambda: len(traffic.served_by(since)) == 4, PATIENCE, "all four workers serve")
        assert {replica["node"] for replica in cluster.ready("decode")} == {HEAD, SECOND}

        # The first decode worker's actor dies, and its process with it: Ray brings both back.
        first = next(r for r in cluster.ready("decode") if r["node"] == HEAD)
        kill_busy(nodes, first)
        ray.kill(ray.get_actor(first["name"], "deltaserve-test"), no_restart=False)
        # Meanwhile prefill goes back to one: its second worker drains.
        cluster.scale("prefill", 1)
        wait_until(lambda: cluster.status()["roles"]["prefill"]["drained"] == 1, PATIENCE, "one has drained")
        settle(nodes, "the actor is back")
        again = next(r for r in cluster.ready("decode") if r["name"] == first["name"])
        assert again["pid"] != first["pid"]
        traffic.wait_for(4, traffic.mark())

        # The second node is lost with the decode worker on it.
        lost = next(r for r in cluster.ready("decode") if r["node"] == SECOND)
        kill_busy(nodes, lost)
        nodes.ray.remove_node(nodes.second, allow_graceful=False)
        traffic.wait_for(4, traffic.mark())
        wait_until(lambda: len(cluster.ready("decode")) == 1, PATIENCE, "the loss is seen")

        # A new node comes: the worker is started there, and scaled away.
        rooms = {"deltaserve_prefill": 1, "deltaserve_decode": 1}
        nodes.ray.add_node(
            num_cpus=4, object_store_memory=STORE, node_ip_address="127.0.0.4", resources=rooms
        )
        settle(nodes, "the lost worker is back elsewhere")
        cluster.scale("decode", 1)
        wait_until(lambda: cluster.status()["roles"]["decode"]["drained"] == 1, PATIENCE, "one has drained")
        settle(nodes, "one worker a role")
        traffic.wait_for(4, traffic.mark())

    assert traffic.errors == []
    assert len(traffic.answers) >= 16
    assert all(answer["right"] for answer in traffic.answers), "a token differs"
    assert resumed(traffic) >= 2, "the control: both dead workers had requests, which went on elsewhere"
    roles = nodes.cluster.status()["roles"]
    assert [roles[role]["killed"] for role in ("prefill", "decode")] == [0, 0], "both drained by themselves"
    health = call(f"{nodes.target.endpoint}/health")[1]
    assert [health["roles"][role]["ready"] for role in ("prefill", "decode")] == [1, 1]


def test_the_planner_scales_it_under_traffic(nodes: Nodes, right: list[list[int]], tmp_path: Path) -> None:
    cluster = nodes.cluster

    def decode(what: str) -> int:
        return int(cluster.status()["roles"]["decode"][what])

    settle(nodes, "one worker a role")
    assert decode("wanted") == 1, "the control: nobody else asks for a second one"
    gone = decode("drained") + decode("killed")
    with Traffic(nodes.target, right) as traffic:
        with planning(nodes, tmp_path, highest=2) as page:
            wait_until(lambda: decode("wanted") == 2, PATIENCE, "the planner asks for a second decode worker")
            settle(nodes, "two decode workers")
            since = traffic.mark()
            wait_until(lambda: len(traffic.served_by(since)) == 3, PATIENCE, "all three workers serve")
            ready = 'deltaserve_planner_ready_replicas{role="decode"} 2.0'
            wait_until(lambda: ready in page(), PATIENCE, "the planner sees the worker")
            assert 'deltaserve_planner_desired_replicas{role="decode"} 2.0' in page()
            assert 'deltaserve_planner_desired_replicas{role="prefill"} 1.0' in page()
        with planning(nodes, tmp_path, highest=1):
            wait_until(lambda: decode("drained") + decode("killed") == gone + 1, PATIENCE, "it is taken away")
            settle(nodes, "one decode worker")
        traffic.wait_for(4, traffic.mark())
    assert cluster.status()["roles"]["prefill"]["wanted"] == 1
    assert traffic.errors == []
    assert all(answer["right"] for answer in traffic.answers), "a token differs"
