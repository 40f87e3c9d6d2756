"""The operator under faults of everything around it: nothing is lost, said twice, or crashes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import witness
from cluster import Cluster, wait_for
from conftest import Helm
from faults import DROP, Answer, Call, Proxy, error_event
from operator_process import Operator, is_answered
from processes import die_with_parent
from tilecast_operator.objects.documents import ADVICE_KEYS

pytestmark = pytest.mark.cluster

TOOLS = Path(__file__).resolve().parent.parent / "tools"
ANSWER_S = 60
QUICK = {
    "TILECAST_RETRY_FIRST_SECONDS": "0.1",
    "TILECAST_RETRY_MOST_SECONDS": "2",
    "TILECAST_SETTLE_SECONDS": "0.1",
    "TILECAST_POOL_RETENTION_SECONDS": "0.5",
}
HYSTERESIS = 0.035
"""Relative change of a step below which the operator keeps its earlier advice."""
WRITES = 2
"""Writes that an answer takes: the annotations, then the status."""


@pytest.fixture(scope="module")
def cluster(bare_cluster: Cluster) -> Cluster:
    return bare_cluster


@pytest.fixture(scope="module")
def account(cluster: Cluster, helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return witness.account_kubeconfig(cluster, helm, tmp_path_factory.mktemp("account") / "kubeconfig.yaml")


@pytest.fixture(scope="module")
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    with Proxy(cluster) as started:
        yield started


@pytest.fixture(scope="module")
def proxied_account(proxy: Proxy, account: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return proxy.kubeconfig(account, tmp_path_factory.mktemp("proxied"))


@pytest.fixture(scope="module")
def direct_operator(cluster: Cluster, account: Path) -> Iterator[Operator]:
    """Yield an operator that the first test that needs it starts."""
    operator = Operator(cluster, account, QUICK)
    yield operator
    operator.stop()


@pytest.fixture(scope="module")
def proxied_operator(cluster: Cluster, proxied_account: Path) -> Iterator[Operator]:
    """Yield an operator that sees the cluster through `proxy`; the first test that needs it starts it."""
    operator = Operator(cluster, proxied_account, QUICK)
    yield operator
    operator.stop()


def survives(one: Operator, other: Operator) -> Iterator[Operator]:
    """Yield one operator, alone with the cluster, and check afterwards that its process is the same and healthy.

    Tests that do not kill it share the process.
    """
    other.stop()
    if one.pid is None:
        one.start()
    pid = one.pid
    yield one
    assert one.pid == pid, f"the operator ended; its last words:\n{one.log_tail()}"
    assert one.get("/healthz") == "ok"


@pytest.fixture
def operator(direct_operator: Operator, proxied_operator: Operator) -> Iterator[Operator]:
    yield from survives(direct_operator, proxied_operator)


@pytest.fixture
def proxied(direct_operator: Operator, proxied_operator: Operator, proxy: Proxy) -> Iterator[Operator]:
    try:
        yield from survives(proxied_operator, direct_operator)
    finally:
        proxy.behave()


def job(name: str, sequence_length: int = 1024) -> dict[str, Any]:
    training = {"sequenceLength": sequence_length, "globalBatchSize": 64, "precision": "fp16"}
    return {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"model": {"preset": "gpt2"}, "training": training},
    }


def create(cluster: Cluster, names: Iterable[str], sequence_length: int = 1024) -> None:
    items = [job(name, sequence_length) for name in names]
    cluster.kubectl("create", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))


def objects(cluster: Cluster, kind: str) -> list[dict[str, Any]]:
    document: list[dict[str, Any]] = json.loads(cluster.kubectl("get", kind, "-o", "json"))["items"]
    return document


def jobs(cluster: Cluster, names: Sequence[str]) -> list[dict[str, Any]]:
    by_name = {item["metadata"]["name"]: item for item in objects(cluster, "trainingjobs")}
    return [by_name[name] for name in names]


def messages(cluster: Cluster, names: Sequence[str]) -> list[list[str]]:
    """Return the Event messages of each job in the order in which they were written."""
    events = sorted(objects(cluster, "events"), key=lambda item: int(item["metadata"]["resourceVersion"]))
    uids = [item["metadata"]["uid"] for item in jobs(cluster, names)]
    return [[item["message"] for item in events if item["involvedObject"]["uid"] == uid] for uid in uids]


def all_answered(cluster: Cluster, names: Sequence[str]) -> Callable[[], bool]:
    return lambda: all(is_answered(item) for item in jobs(cluster, names))


def prove_answered_once(cluster: Cluster, names: Sequence[str], since: int, most_writes: int = WRITES) -> None:
    """Wait until every job is answered, and check that each has one Event and at most `most_writes` changes."""
    wait_for(all_answered(cluster, names), f"answers to {len(names)} jobs", ANSWER_S)
    for one in jobs(cluster, names):
        assert one["status"]["summary"]["reason"] == "Advised"
        assert set(ADVICE_KEYS) <= one["metadata"]["annotations"].keys()
        assert "finalizers" not in one["metadata"]
    counts = Counter(item["involvedObject"]["name"] for item in objects(cluster, "events"))
    assert {name: counts[name] for name in names} == dict.fromkeys(names, 1)
    made = witness.changes(cluster, since)
    assert {name: made[name] for name in names if made[name] > most_writes} == {}


def test_the_api_server_is_killed_and_started_again(cluster: Cluster, operator: Operator) -> None:
    since, names = witness.mark(cluster), [f"outage-{number}" for number in range(20)]
    create(cluster, names)
    cluster.kill("kube-apiserver")
    time.sleep(1.0)
    cluster.revive()
    create(cluster, ["after-outage"])
    prove_answered_once(cluster, [*names, "after-outage"], since)


def test_etcd_hangs_and_comes_back(cluster: Cluster, operator: Operator) -> None:
    since, names = witness.mark(cluster), [f"hang-{number}" for number in range(20)]
    create(cluster, names)
    with cluster.paused("etcd"):
        time.sleep(8.0)
    create(cluster, ["after-hang"])
    prove_answered_once(cluster, [*names, "after-hang"], since)


REFUSALS = [
    ("409", Answer(409)),
    ("410", Answer(410)),
    ("429", Answer(429, {"Retry-After": "1"})),
    ("422", Answer(422)),
    ("500", Answer(500)),
    ("503", Answer(503)),
    ("504", Answer(504)),
    ("broken-off", DROP),
]


EVENT_IS_GIVEN_UP = ("409", "410", "422")
"""Statuses after which an Event is not tried again, because it exists or can never be written."""


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(("name", "answer"), REFUSALS, ids=[name for name, _ in REFUSALS])
def test_refused_writes_are_written_in_the_end(
    cluster: Cluster, proxy: Proxy, proxied: Operator, name: str, answer: Answer, moment: str
) -> None:
    """The write is refused before the API server sees it, or after it took effect; the operator cannot tell which."""
    left = {"trainingjobs": 2, "events": 0 if name in EVENT_IS_GIVEN_UP else 2, "trainingjobs/status": 2}

    def refuse(asked: Call) -> Answer | None:
        if not asked.is_write or left[asked.resource] == 0:
            return None
        left[asked.resource] -= 1
        return answer

    since, names = witness.mark(cluster), [f"refused-{name}-{moment}-{number}" for number in range(3)]
    setattr(proxy, moment, refuse)
    create(cluster, names)
    prove_answered_once(cluster, names, since)
    assert not any(left.values())


@pytest.mark.parametrize(("name", "answer"), REFUSALS, ids=[name for name, _ in REFUSALS])
def test_refused_lists_and_watches_are_asked_again(
    cluster: Cluster, proxy: Proxy, proxied: Operator, name: str, answer: Answer
) -> None:
    left = 2

    def refuse(asked: Call) -> Answer | None:
        nonlocal left
        if asked.resource != "trainingjobs" or asked.is_write or left == 0:
            return None
        left -= 1
        return answer

    since, names = witness.mark(cluster), [f"unread-{name}-{number}" for number in range(2)]
    proxy.before = refuse
    assert proxy.cut("trainingjobs") == 1
    create(cluster, names)
    prove_answered_once(cluster, names, since)
    assert left == 0


@pytest.mark.parametrize("code", [410, 429, 500, 504])
def test_a_watch_that_ends_in_an_error_is_begun_anew(
    cluster: Cluster, proxy: Proxy, proxied: Operator, code: int
) -> None:
    since, names = witness.mark(cluster), [f"expired-{code}-{number}" for number in range(2)]
    wait_for(lambda: proxy.cut("trainingjobs", error_event(code)) == 1, "a watch to cut", ANSWER_S)
    create(cluster, names)
    prove_answered_once(cluster, names, since)


def twice(_: Call, line: bytes) -> Iterable[bytes]:
    return line, line


class Swapped:
    """Each event changes places with the next one; the last one is held until another comes."""

    def __init__(self) -> None:
        self._held: dict[Call, bytes] = {}

    def __call__(self, asked: Call, line: bytes) -> Iterable[bytes]:
        held = self._held.pop(asked, None)
        if held is not None:
            return line, held
        self._held[asked] = line
        return ()


class Dropped:
    """Loses two of three events."""

    def __init__(self) -> None:
        self._seen = 0

    def __call__(self, asked: Call, line: bytes) -> Iterable[bytes]:
        self._seen += 1
        return (line,) if self._seen % 3 == 0 else ()


@pytest.fixture
def distrustful(
    cluster: Cluster, proxy: Proxy, proxied_account: Path, direct_operator: Operator, proxied_operator: Operator
) -> Iterator[Operator]:
    """Yield an operator that lists everything again on the first event after a second."""
    direct_operator.stop()
    proxied_operator.stop()
    with Operator(cluster, proxied_account, {**QUICK, "TILECAST_RELIST_SECONDS": "1"}) as started:
        pid = started.pid
        yield started
        proxy.behave()
        assert started.pid == pid


@pytest.mark.parametrize("garble", [lambda: twice, Swapped, Dropped], ids=["duplicated", "reordered", "dropped"])
def test_what_garbled_watches_hide_is_found_in_the_next_list(
    cluster: Cluster,
    proxy: Proxy,
    distrustful: Operator,
    garble: Callable[[], Any],
    request: pytest.FixtureRequest,
) -> None:
    how = request.node.callspec.id
    since, names = witness.mark(cluster), [f"{how}-{number}" for number in range(9)]
    proxy.events = garble()
    create(cluster, names)
    changed, reborn, gone = names[0], names[1], f"{how}-gone"
    create(cluster, [gone])
    cluster.kubectl("patch", "tjob", changed, "--type=merge", "-p", '{"spec":{"training":{"sequenceLength":512}}}')
    cluster.kubectl("delete", "tjob", reborn, gone)
    create(cluster, [reborn])
    time.sleep(1.0)
    proxy.behave()
    create(cluster, [f"{how}-last"])
    wait_for(all_answered(cluster, names), f"answers to {len(names)} jobs", ANSWER_S)
    (item,) = jobs(cluster, [changed])
    assert item["status"]["observedGeneration"] == item["metadata"]["generation"] == 2
    prove_answered_once(cluster, [*names[2:], f"{how}-last"], since)


def written_within(cluster: Cluster, seconds: float) -> list[str]:
    """Return the writes of the operators during the next `seconds`."""
    since = witness.mark(cluster)
    time.sleep(seconds)
    entries = witness.of_the_operator(cluster, since)
    return [f"{entry['verb']} {witness.resource(entry)}" for entry in entries if entry["verb"] in witness.WRITING]


def test_nodes_that_come_and_go_leave_the_advice_as_of_the_nodes_that_stay(
    cluster: Cluster, operator: Operator
) -> None:
    names = [f"churn-{number}" for number in range(5)]
    create(cluster, names)
    wait_for(all_answered(cluster, names), "answers", ANSWER_S)
    before, since = jobs(cluster, names), witness.mark(cluster)
    template = next(
        item for item in objects(cluster, "nodes") if "nvidia.com/gpu.product" in item["metadata"]["labels"]
    )
    for field in ("uid", "resourceVersion", "creationTimestamp", "managedFields"):
        template["metadata"].pop(field, None)
    for turn in range(6):
        fleet = []
        for number in range(20):
            node = json.loads(json.dumps(template))
            node["metadata"]["name"] = f"passing-{number}"
            if (turn + number) % 3 == 0:
                node["metadata"]["labels"]["nvidia.com/gpu.product"] = "NVIDIA-Z900"
            fleet.append(node)
        cluster.kubectl("create", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": fleet}))
        cluster.kubectl("delete", "node", *(node["metadata"]["name"] for node in fleet), "--wait=false")

    def step_s(job: dict[str, Any]) -> float:
        return float(job["status"]["recommendation"]["stepSeconds"]["target"])

    def is_as_good_as_before() -> bool:
        now = jobs(cluster, names)
        steps = [[item["status"]["recommendation"]["stepSeconds"]["target"] for item in one] for one in (before, now)]
        return all(abs(after / was - 1) < HYSTERESIS for was, after in zip(*steps, strict=True))

    def is_silent() -> bool:
        return not written_within(cluster, 3.0)

    wait_for(is_as_good_as_before, "the advice of before", ANSWER_S)
    wait_for(is_silent, "an end of the writes", ANSWER_S)
    with Operator(cluster, operator.kubeconfig, QUICK):
        written = written_within(cluster, 3.0)
    assert written == [], "an operator that has only seen the nodes that stay has nothing to correct"
    for texts in messages(cluster, names):
        assert all(one != other for one, other in itertools.pairwise(texts)), "said again only after something else was"
    turns = operator.log_tail(100_000).count('"message": "pools: ')
    assert max(witness.changes(cluster, since).values(), default=0) <= (WRITES + 1) * turns, "and what is free"


def test_a_wrong_clock_changes_nothing_but_times(cluster: Cluster, account: Path, operator: Operator) -> None:
    create(cluster, ["on-time"])
    wait_for(all_answered(cluster, ["on-time"]), "an answer", ANSWER_S)
    since, names = witness.mark(cluster), [f"clocks-{number}" for number in range(10)]
    day_s = 86400.0
    with Operator(cluster, account, QUICK, -40 * day_s), Operator(cluster, account, QUICK, 40 * day_s):
        create(cluster, names)
        prove_answered_once(cluster, names, since)
        versions = [item["metadata"]["resourceVersion"] for item in jobs(cluster, names)]
        time.sleep(2.0)
        assert [item["metadata"]["resourceVersion"] for item in jobs(cluster, names)] == versions
    assert witness.changes(cluster, since).get("on-time", 0) == 0


def test_three_operators_say_everything_once(cluster: Cluster, account: Path, operator: Operator) -> None:
    since, names = witness.mark(cluster), [f"crowded-{number}" for number in range(30)]
    with Operator(cluster, account, QUICK), Operator(cluster, account, QUICK):
        create(cluster, names)
        prove_answered_once(cluster, names, since)


FORKED_OPERATORS = """
import logging, os, signal, sys
import kopf
import tilecast.advice, tilecast_operator.main
from processes import die_with_parent
logging.basicConfig(level=logging.INFO)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        kopf.run(standalone=True, clusterwide=True)
        os._exit(1)
    print(pid, flush=True)
"""
"""Program that starts an operator for each line that it reads and prints its process id.

It forks from a process that has imported everything.
"""


def test_it_is_killed_fifty_times_amid_its_writes(
    cluster: Cluster, proxy: Proxy, direct_operator: Operator, proxied_operator: Operator
) -> None:
    """It is killed alternately before a write reaches the API server and after it was carried out, at write 1 to 4."""
    kills, jobs_count = 50, 120
    paths = os.pathsep.join((proxied_operator.environment["PYTHONPATH"], str(TOOLS)))
    environment = {**proxied_operator.environment, "TILECAST_LISTEN_PORT": "0", "PYTHONPATH": paths}
    direct_operator.stop()
    proxied_operator.kill()
    since, names = witness.mark(cluster), [f"killed-{number}" for number in range(jobs_count)]
    victim, killed, writes = 0, threading.Event(), 0

    def kill(nth: int) -> Callable[[Call], Answer | None]:
        def strike(asked: Call) -> Answer | None:
            nonlocal writes
            writes += asked.is_write
            if not asked.is_write or writes < nth or killed.is_set():
                return None
            os.kill(victim, signal.SIGKILL)
            killed.set()
            return DROP

        return strike

    log = cluster.folder / "forked.log"
    with (
        log.open("ab") as written,
        subprocess.Popen(
            [sys.executable, "-c", FORKED_OPERATORS],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=written,
            text=True,
            preexec_fn=die_with_parent,
        ) as forks,
    ):
        assert forks.stdin is not None and forks.stdout is not None
        create(cluster, names)
        for number in range(kills):
            killed.clear()
            writes = 0
            proxy.behave()
            setattr(proxy, "after" if number % 2 else "before", kill(1 + number // 2 % 4))
            print(file=forks.stdin, flush=True)
            victim = int(forks.stdout.readline())
            assert killed.wait(ANSWER_S), f"no write to interrupt by operator {number}:\n{log.read_text()[-2000:]}"
        forks.stdin.close()
    proxy.behave()
    assert not all_answered(cluster, names)(), "the last one has work left to do"
    proxied_operator.start()
    prove_answered_once(cluster, names, since)
