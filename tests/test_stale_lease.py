"""Jobs are released while the operator is down, and never while a leader lives, whatever the clocks say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from lease_store import PATH, PLACE
from test_release import HeldJobs
from tilecast.jobs import APPLIED
from tilecast_operator import release
from tilecast_operator.kube.client import ApiError
from tilecast_operator.kube.lease import Election, Leadership
from tilecast_operator.kube.stale_lease import LeaderLivesError, StaleLease
from tilecast_operator.objects.documents import LEASE_ADDRESS

AFTER_S = 0.2
QUICK = {"look_s": 0.01, "fresh_s": 0.0, "margin_s": 0.0}


class LeasedJobs(HeldJobs):
    """Serves held jobs and the operator's Lease."""

    def __init__(self) -> None:
        super().__init__()
        self.lease: dict[str, Any] | None = None
        self.faults: list[Exception] = []
        self.on_look: Callable[[], None] = lambda: None

    def renew(self, renewed: datetime, duration_s: int = 0) -> None:
        spec = {"holderIdentity": "a", "leaseDurationSeconds": duration_s, "renewTime": renewed.isoformat()}
        version = 1 if self.lease is None else int(self.lease["metadata"]["resourceVersion"]) + 1
        self.lease = {"metadata": {"uid": "u", "resourceVersion": str(version)}, "spec": spec}

    async def get(self, path: str, query: Any = None) -> dict[str, Any]:
        if path != f"{PATH}/tilecast":
            return await super().get(path, query)
        self.on_look()
        if self.faults:
            raise self.faults.pop(0)
        if self.lease is None:
            raise ApiError(404, "not found")
        return self.lease

    async def release_if_stale(self) -> release.JobRelease:
        lease = StaleLease(self, PLACE, **QUICK)  # type: ignore[arg-type]
        work = release.JobRelease(self, self.lines.append, lease=lease, pause_s=0.0)  # type: ignore[arg-type]
        await lease.wait_until_stale(AFTER_S)
        await work.run()
        return work


@pytest.mark.parametrize("ahead", [timedelta(days=-1), timedelta(), timedelta(days=1)])
@pytest.mark.slow
async def test_a_lease_that_nobody_renews_lets_every_job_go_whatever_its_clock_says(ahead: timedelta) -> None:
    cluster = LeasedJobs()
    path = cluster.add("job-kueue", "a")
    cluster.renew(datetime.now(UTC) + ahead)
    assert (await cluster.release_if_stale()).freed == {"Job": 1}
    assert cluster.jobs[path]["metadata"]["annotations"][APPLIED] == "OperatorDown"


async def test_an_operator_that_never_led_lets_every_job_go() -> None:
    cluster = LeasedJobs()
    cluster.add("job", "a")
    assert (await cluster.release_if_stale()).freed == {"Job": 1}


@asynccontextmanager
async def renewing(cluster: LeasedJobs, ahead: timedelta) -> AsyncIterator[None]:
    async def renew() -> None:
        while True:
            cluster.renew(datetime.now(UTC) + ahead)
            await asyncio.sleep(0)

    task = asyncio.create_task(renew())
    await asyncio.sleep(0)
    yield
    task.cancel()


@pytest.mark.parametrize("ahead", [timedelta(days=-1), timedelta(), timedelta(days=1)])
async def test_no_job_is_let_go_while_a_leader_lives_whatever_its_clock_says(ahead: timedelta) -> None:
    cluster = LeasedJobs()
    cluster.add("job", "a")
    async with renewing(cluster, ahead):
        with pytest.raises(LeaderLivesError, match=PLACE):
            await cluster.release_if_stale()
    assert not cluster.patches


async def test_a_leader_that_renews_rarely_is_waited_for() -> None:
    cluster = LeasedJobs()
    cluster.add("job", "a")
    cluster.renew(datetime.now(UTC), duration_s=3600)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3 * AFTER_S):
            await cluster.release_if_stale()
    assert not cluster.patches


async def test_a_leader_that_comes_back_ends_it_before_the_next_job() -> None:
    cluster = LeasedJobs()
    cluster.add("job", "a")
    cluster.add("job", "b")
    cluster.renew(datetime.now(UTC))
    lease = StaleLease(cluster, PLACE, **QUICK)  # type: ignore[arg-type]
    await lease.wait_until_stale(AFTER_S)
    work = release.JobRelease(cluster, cluster.lines.append, lease=lease, pause_s=0.0)  # type: ignore[arg-type]
    cluster.on_look = lambda: cluster.renew(datetime.now(UTC)) if cluster.patches else None
    with pytest.raises(LeaderLivesError):
        await work.run()
    assert work.freed == {"Job": 1} == {"Job": len(cluster.patches)}


@pytest.mark.slow
async def test_a_look_that_fails_is_no_sign_of_death_and_the_last_must_not() -> None:
    cluster = LeasedJobs()
    cluster.add("job", "a")
    cluster.renew(datetime.now(UTC))
    looks = iter(range(1000))
    cluster.on_look = lambda: cluster.faults.append(ApiError(503, "busy")) if next(looks) == 1 else None
    assert (await cluster.release_if_stale()).freed == {"Job": 1}
    cluster.add("job", "b")
    cluster.faults = [ApiError(403, "forbidden")]
    with pytest.raises(ApiError):
        await cluster.release_if_stale()
    looks = iter(range(1000))
    cluster.on_look = lambda: cluster.faults.append(TimeoutError()) if next(looks) > 0 else None
    with pytest.raises(TimeoutError):
        await cluster.release_if_stale()
    assert len(cluster.patches) == 1


async def test_the_leader_of_an_election_is_seen_to_live() -> None:
    """What the operator's own Election writes shows that its leader lives."""
    cluster = LeasedJobs()
    cluster.add("job", "a")
    cluster.create, cluster.replace = _keeper(cluster), _keeper(cluster)  # type: ignore[attr-defined]
    leadership = Leadership(is_alone=False)
    election = Election(cluster, PLACE, "a", "", LEASE_ADDRESS, 1, leadership)  # type: ignore[arg-type]
    task = asyncio.create_task(election.run_election())
    while not leadership.is_leader:
        await asyncio.sleep(0.01)
    lease = StaleLease(cluster, PLACE, **QUICK)  # type: ignore[arg-type]
    with pytest.raises(LeaderLivesError):
        await lease.wait_until_stale(30.0)
    task.cancel()
    await lease.wait_until_stale(AFTER_S)


def _keeper(cluster: LeasedJobs) -> Any:
    async def keep(path: str, document: Any, **options: Any) -> dict[str, Any]:
        version = 0 if cluster.lease is None else int(cluster.lease["metadata"]["resourceVersion"])
        cluster.lease = json.loads(json.dumps(document))
        assert cluster.lease is not None
        cluster.lease["metadata"] |= {"uid": "u", "resourceVersion": str(version + 1)}
        return cluster.lease

    return keep


def test_a_lease_that_is_none_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["--if-stale", "tilecast"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --if-stale: 'tilecast' is no namespace/name")
