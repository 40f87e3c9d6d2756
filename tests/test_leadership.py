"""Two replicas and one Lease: one writes, the other stands by; reports to either reach the one that writes."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import generate_latest

from bearer_tokens import token
from cluster import free_ports
from lease_store import PLACE, CutOff, LeaseStore
from operator_store import JOBS, LEARNINGS, POOLS, job, on_first_pool, operator, ready, settled
from test_server import certificate
from tilecast.advice import Advice, Request, advise
from tilecast.hardware import Pool
from tilecast.spec import SpecError
from tilecast_operator import server
from tilecast_operator import settings as settings_module
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.kube.client import UNREACHABLE, Connection
from tilecast_operator.kube.lease import Election, Leadership, NotLeaderError
from tilecast_operator.objects.client import client
from tilecast_operator.objects.documents import LEASE_ADDRESS
from tilecast_operator.relay import CLIENT, RELAYED, ReportForwarder


async def until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


class LeaseCandidate:
    """A replica's part in an election."""

    def __init__(self, store: Any, name: str, lease_s: int = 1) -> None:
        self.leadership = Leadership(is_alone=False)
        self.election = Election(store, PLACE, name, f"http://{name}:8080", LEASE_ADDRESS, lease_s, self.leadership)
        self.changes: list[bool] = []
        self.leadership.add_listener(self.changes.append)
        self._task = asyncio.create_task(self.election.run_election())

    @property
    def leads(self) -> bool:
        return self.leadership.is_leader

    def die(self) -> None:
        """End without releasing the lease."""
        self._task.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.die()


async def never_together(one: LeaseCandidate, other: LeaseCandidate, seconds: float) -> None:
    """Check for some seconds that at most one of the two leads.

    Which of them leads is not checked: on a machine that stalls for longer than the lease, it changes.
    """
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        assert not (one.leads and other.leads)
        await asyncio.sleep(0.002)


@pytest.mark.slow
async def test_the_next_one_leads_once_a_dead_leaders_lease_has_ended() -> None:
    store = LeaseStore()
    async with LeaseCandidate(store, "first") as first:
        await until(lambda: first.leads)
        async with LeaseCandidate(store, "next") as following:
            await until(lambda: following.election.leader_address == "http://first:8080")
            await never_together(first, following, 1.5)
            first.die()
            await until(lambda: following.leads)
            assert (first.leads, store.holder) == (False, "next")
            assert following.election.leader_address is None
            await until(lambda: first.changes[-1] is False)


async def test_a_leader_that_ends_lets_the_next_one_lead_at_once() -> None:
    store = LeaseStore()
    async with LeaseCandidate(store, "first", 100) as first:
        await until(lambda: first.leads)
        first.die()
        await first.election.release_lease()
        assert not first.leads and store.holder == ""
    async with LeaseCandidate(store, "next", 100) as following:
        await until(lambda: following.leads)


async def test_a_leader_that_is_cut_off_writes_no_more_before_another_may() -> None:
    store = LeaseStore()
    cut = CutOff(store)
    async with LeaseCandidate(cut, "cut") as leader:
        await until(lambda: leader.leads)
        async with LeaseCandidate(store, "next") as following:
            await until(lambda: following.election.leader_address)
            cut.is_cut = True
            together = 0
            while not following.leads:
                together += leader.leads and following.leads
                await asyncio.sleep(0.002)
            assert (together, leader.leads) == (0, False)
            cut.is_cut = False
            await until(lambda: leader.election.leader_address == "http://next:8080")
            assert following.leads and not leader.leads
            assert leader.changes == [True, False]


@pytest.mark.slow
async def test_an_api_server_that_is_away_leaves_nobody_leading_and_then_one() -> None:
    store = LeaseStore()
    async with LeaseCandidate(store, "a") as one, LeaseCandidate(store, "b") as other:
        await until(lambda: one.leads or other.leads)
        store.is_away = True
        await until(lambda: not (one.leads or other.leads))
        store.is_away = False
        await until(lambda: one.leads or other.leads)
        await never_together(one, other, 1.0)
        await until(lambda: one.leads or other.leads)


async def test_a_process_that_was_stopped_finds_its_right_gone() -> None:
    leadership = Leadership(is_alone=False)
    leadership.extend_lead(time.monotonic() + 0.2)

    async def write() -> str:
        async with leadership.guard_write():
            return "written"

    assert await write() == "written"
    time.sleep(0.3)  # as SIGSTOP would: no timer of the loop runs
    with pytest.raises(NotLeaderError):
        await write()


async def test_a_lease_that_lapsed_while_no_timer_ran_is_begun_anew() -> None:
    leadership, changes = Leadership(is_alone=False), list[bool]()
    leadership.add_listener(changes.append)
    leadership.extend_lead(time.monotonic() + 0.05)
    time.sleep(0.1)
    leadership.extend_lead(time.monotonic() + 30.0)
    assert changes == [True, False, True], "what was refused meanwhile is due again"


async def test_a_write_that_outlasts_the_lease_is_broken_off_and_one_that_does_not_is_not() -> None:
    leadership = Leadership(is_alone=False)

    async def write(seconds: float) -> str:
        async with leadership.guard_write():
            await asyncio.sleep(seconds)
            return "written"

    leadership.extend_lead(time.monotonic() + 0.2)
    with pytest.raises(TimeoutError):
        await write(30.0)
    leadership.extend_lead(time.monotonic() + 1.0)
    slow = asyncio.create_task(write(1.2))
    await asyncio.sleep(0)
    leadership.extend_lead(time.monotonic() + 30.0)
    assert await slow == "written", "its lease was renewed meanwhile"


async def test_nothing_is_sent_by_a_process_that_was_stopped_while_it_waited_for_a_connection() -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.method)
        return web.json_response({})

    application = web.Application()
    application.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api = client(5.0)
    api.log_in(lambda: Connection(f"http://127.0.0.1:{runner.addresses[0][1]}", {}, ssl.create_default_context()))

    def fence() -> None:
        raise NotLeaderError

    try:
        await api.patch("/a", [])
        api.fence = fence
        for write in (api.apply("/a", {}), api.patch("/a", []), api.create("/a", {}), api.delete("/a", "u", "1")):
            with pytest.raises(NotLeaderError):
                await write
        looks = itertools.count()

        def later() -> None:
            if next(looks) % 2:
                raise NotLeaderError

        api.fence = later
        for write in (api.apply("/a", {}), api.patch("/a", []), api.create("/a", {}), api.delete("/a", "u", "1")):
            with pytest.raises((NotLeaderError, *UNREACHABLE)):
                await write
        await api.get("/a")
        await api.create("/a", {}, is_fenced=False)
    finally:
        await api.close()
        await runner.cleanup()
    assert asked == ["PATCH", "GET", "POST"]


@pytest.mark.parametrize("place", ["tilecast", "/tilecast", "a/b/c", "A/b", "a/"])
def test_a_lease_has_a_namespace_and_a_name(place: str) -> None:
    with pytest.raises(SpecError, match="namespace/name") as caught:
        settings_module.from_environment({"TILECAST_LEASE": place})
    assert caught.value.field == "TILECAST_LEASE"


def show(store: LeaseStore, *replicas: OperatorParts) -> None:
    """Show the replicas everything in the store, as the API server's watches would."""
    for replica in replicas:
        for body in list(store.objects.values()):
            replica.cache.put_object(body)


@asynccontextmanager
async def replicas(
    store: LeaseStore, search: Any = on_first_pool, **settings: Any
) -> AsyncIterator[list[OperatorParts]]:
    """Run two replicas, of which the first leads; each serves reports.

    A lease is longer than a busy machine stops a test.
    """
    async with AsyncExitStack() as stack:
        running_replicas: list[OperatorParts] = []
        for name, port in zip(("leader", "follower"), free_ports(2), strict=True):
            own = {"lease": PLACE, "lease_s": 20, "instance": name, "pod_ip": "127.0.0.1", "listen_port": port}
            running = await stack.enter_async_context(operator(store, search, **{**own, **settings}))
            runner = await server.start_server(
                server.ListenAddress("127.0.0.1", port), running.metrics.registry,
                running.find_health_problem, running.find_readiness_problem,
                running.guard.admit_report, running.observations.put,
                running.relay.forward_report, running.relay.find_client_address,
            )  # fmt: skip
            stack.push_async_callback(runner.cleanup)
            running_replicas.append(running)
            await until(lambda: running_replicas[0].leadership.is_leader)
        assert running_replicas[1].election is not None
        election = running_replicas[1].election
        await until(lambda: election.leader_address)
        yield running_replicas


async def test_the_one_that_follows_writes_nothing_and_has_every_answer_ready() -> None:
    store, searches = LeaseStore(), list[str]()

    def counted(request: Request, pools: Sequence[Pool]) -> Advice:
        searches.append(request.name)
        return on_first_pool(request, pools)

    async with replicas(store, counted, discovery=True) as (leader, follower):
        await until(lambda: any(path.startswith(POOLS) for path in store.objects))  # what the leader discovers
        for name in "abc":
            store.put(f"{JOBS}/{name}", job(name))
        show(store, follower)
        await settled(follower)
        assert not [path for _, path in store.writes if path.startswith(JOBS)] and store.events == {}
        assert follower.find_readiness_problem() is None and follower.find_health_problem() is None
        searched = len(searches)
        await leader.stop()
        await until(lambda: follower.leadership.is_leader)
        await until(lambda: all("status" in store.objects[f"{JOBS}/{name}"] for name in "abc"))
        assert all(ready(store.objects[f"{JOBS}/{name}"])["reason"] == "Advised" for name in "abc")
        assert len(searches) == searched, "every answer was ready"


@pytest.mark.slow
async def test_what_the_leader_wrote_is_not_written_again_by_the_next() -> None:
    store = LeaseStore()
    for name in "abc":
        store.put(f"{JOBS}/{name}", job(name))
    async with replicas(store, discovery=True) as (leader, follower):
        await settled(leader)
        show(store, leader, follower)
        await settled(leader)
        await settled(follower)
        written = list(store.writes)
        await leader.stop()
        await until(lambda: follower.leadership.is_leader)
        await settled(follower, 120)
        assert store.writes == written


async def put(
    running: OperatorParts, name: str, seconds: float, address: str = "127.0.0.1", **more: str
) -> tuple[int, str]:
    url = f"http://127.0.0.1:{running.settings.listen_port}/observations/default/{name}"
    body, headers = (
        json.dumps({"stepSeconds": seconds}).encode(),
        {"Authorization": f"Bearer {token('default', exp=time.time() + 600)}"},
    )
    connector = aiohttp.TCPConnector(local_addr=(address, 0))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.put(url, data=body, headers=headers | more) as answer,
    ):
        return answer.status, (await answer.json())["outcome"]


def samples(store: LeaseStore, name: str) -> int:
    observed = store.objects[f"{JOBS}/{name}"].get("status", {}).get("observed", {})
    return int(observed.get("samples", 0))


@pytest.mark.slow
async def test_reports_count_once_by_whichever_door_they_come_and_whoever_leads() -> None:
    store = LeaseStore()
    training = {"sequenceLength": 512, "globalBatchSize": 16, "precision": "bf16"}
    asked = job("a", model={"preset": "gpt2"}, training=training, constraints={"gpus": 8})
    store.put(f"{JOBS}/a", asked)
    async with replicas(store, advise, discovery=True, observe_settle_s=30.0) as both:
        leader, follower = both
        await settled(leader)
        show(store, *both)
        await settled(leader)
        target = store.objects[f"{JOBS}/a"]["status"]["recommendation"]["stepSeconds"]["target"]
        for number in range(10):
            assert await put(both[number % 2], "a", target) == (202, "accepted")
        await leader.stop()
        assert samples(store, "a") == 10, "a replica that ends writes what it has accepted"
        show(store, follower)
        await until(lambda: follower.leadership.is_leader)
        assert await put(leader, "a", target) == (503, "unavailable")
        for _ in range(10):
            assert await put(follower, "a", target) == (202, "accepted")
        await follower.observations.flush_reports()
        assert samples(store, "a") == 20


@pytest.mark.slow
async def test_the_next_leader_brings_no_run_back_that_was_withdrawn() -> None:
    store, annotation = LeaseStore(), "tilecast.dev/observed-step-seconds"
    training = {"sequenceLength": 512, "globalBatchSize": 16, "precision": "bf16"}
    store.put(f"{JOBS}/a", job("a", model={"preset": "gpt2"}, training=training, constraints={"gpus": 8}))
    learning = f"{LEARNINGS}/h100-sxm"

    async with replicas(store, advise, discovery=True, observe_settle_s=0.01) as both:
        leader, follower = both

        async def see_until(condition: Callable[[], object], *seeing: OperatorParts) -> None:
            async with asyncio.timeout(60):
                while not condition():
                    show(store, *seeing)
                    await asyncio.sleep(0.01)
            show(store, *seeing)

        def status() -> dict[str, Any]:
            return dict(store.objects[f"{JOBS}/a"].get("status", {}))

        await see_until(lambda: status().get("recommendation"), *both)
        asked = store.objects[f"{JOBS}/a"]
        target = status()["recommendation"]["stepSeconds"]["target"]
        asked["metadata"]["annotations"][annotation] = f"{1.1 * target:.6g}"
        store.put(f"{JOBS}/a", asked)
        await see_until(
            lambda: "observed" in status() and store.objects.get(learning, {}).get("spec", {}).get("runs"), *both
        )
        del store.objects[f"{JOBS}/a"]["metadata"]["annotations"][annotation]
        store.put(f"{JOBS}/a", store.objects[f"{JOBS}/a"])
        # The other replica sees only that the job is gone.
        await see_until(lambda: not store.objects[learning]["spec"].get("runs"), leader)
        assert "observed" not in status()
        gone = store.objects.pop(f"{JOBS}/a")
        for replica in both:
            replica.cache.remove_object(gone)
        show(store, *both)
        await leader.stop()
        await until(lambda: follower.leadership.is_leader)
        await settled(follower, 120)
        assert not store.objects[learning]["spec"].get("runs")


async def test_clients_of_another_replica_are_limited_each_and_none_by_what_it_says_it_is() -> None:
    store = LeaseStore()
    store.put(f"{JOBS}/a", job())
    async with replicas(store, reports_per_client=0.01) as (leader, follower):
        await settled(leader)
        show(store, leader, follower)
        await settled(leader)
        for host in range(2, 6):
            assert (await put(follower, "a", 1.0, f"127.0.0.{host}"))[0] != 429
            assert (await put(follower, "a", 1.0, f"127.0.0.{host}"))[0] == 429
        for host, limited in ((2, False), (3, True), (4, True)):
            forged = {RELAYED: "leader", CLIENT: f"10.0.0.{host}"}
            assert ((await put(leader, "a", 1.0, "127.0.0.9", **forged))[0] == 429) is limited


async def test_a_replica_trusts_the_certificate_that_it_serves_and_not_who_signed_it(tmp_path: Path) -> None:
    for name in ("ours", "signer"):
        (tmp_path / name).mkdir()
        certificate(tmp_path / name, name)
    path, texts = tmp_path / "tls.crt", [(tmp_path / name / "tls.crt").read_text() for name in ("ours", "signer")]
    path.write_text("".join(texts))
    relay = ReportForwarder(Leadership(is_alone=False), None, str(path))
    first = relay._find_leader_tls()
    assert isinstance(first, ssl.SSLContext) and first.cert_store_stats()["x509"] == 1
    assert relay._find_leader_tls() is first, "a connection is used again by requests of the same context alone"
    path.write_text(texts[1])
    os.utime(path, (1.0, 1.0))
    second = relay._find_leader_tls()
    assert isinstance(second, ssl.SSLContext) and second is not first
    assert second.cert_store_stats()["x509"] == 2, "the other replica may still serve the one before"


@pytest.mark.slow
async def test_a_replica_that_ends_releases_its_lease() -> None:
    store = LeaseStore()
    async with replicas(store, lease_s=30) as (leader, follower):
        await follower.stop()
        assert store.holder == "leader", "only its own"
        await leader.stop()
        assert store.holder == ""


@pytest.mark.slow
async def test_nobody_takes_a_report_while_nobody_leads() -> None:
    store = LeaseStore()
    store.put(f"{JOBS}/a", job())
    async with replicas(store, lease_s=1) as (leader, follower):
        store.is_away = True
        await until(lambda: not leader.leadership.is_leader)
        await asyncio.sleep(1.5)
        for replica in (leader, follower):
            assert await put(replica, "a", 1.0) == (503, "unavailable")


async def test_the_leader_shows_the_cluster_and_every_replica_shows_itself() -> None:
    store = LeaseStore()
    async with replicas(store) as (leader, follower):
        await settled(leader)
        await settled(follower)
        texts = [generate_latest(one.metrics.registry).decode() for one in (leader, follower)]
        assert ["tilecast_leader 1.0" in text for text in texts] == [True, False]
        assert ["tilecast_leader 0.0" in text for text in texts] == [False, True]
        assert ['tilecast_gpu_capacity{pool="h100-sxm"' in text for text in texts] == [True, False]
        assert all("tilecast_build_info" in text for text in texts)
        for one in (leader, follower):
            one.metrics.set_kueue_metrics("v1beta2", "0.19.0", True, "present")
        texts = [generate_latest(one.metrics.registry).decode() for one in (leader, follower)]
        assert ["tilecast_kueue_info{" in text for text in texts] == [True, False]
        await leader.stop()
        await until(lambda: follower.leadership.is_leader)
        text = generate_latest(follower.metrics.registry).decode()
        assert "tilecast_leader 1.0" in text and 'tilecast_gpu_capacity{pool="h100-sxm"' in text
