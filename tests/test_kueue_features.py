"""Reports about Kueue's features, and the replica that makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from tilecast.jobs import ADMISSION_GATES
from tilecast_operator.controllers.kueue_features import KueueDetector
from tilecast_operator.kube.client import ApiError
from tilecast_operator.kube.documents import EventContent
from tilecast_operator.kube.lease import Leadership
from tilecast_operator.metrics import Metrics


class KueueServer:
    """Serves Kueue with one Workload, and accepts Events."""

    def __init__(self) -> None:
        self.has_gate = False
        self.is_busy = False
        self.events: list[tuple[str, bool]] = []

    async def served_version(self, group: str, *, is_refresh: bool = False) -> str:
        return "v1beta2"

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        return {"items": [{"metadata": {"uid": "u", "namespace": "team", "name": "w"}}]}

    async def dry_run(self, path: str, patch: Any) -> None:
        if self.has_gate:
            raise ApiError(422, f"{ADMISSION_GATES} names one twice")

    async def post_event(self, key: Any, uid: str, note: EventContent, *, is_change: bool = False) -> bool:
        if self.is_busy:
            raise ApiError(503, "busy")
        self.events.append((note.text.partition(";")[0], is_change))
        return True


OFF, ON = (f"Kueue (v1beta2): the feature gate AdmissionGatedBy is {state}" for state in ("off", "on"))


def checked(server: KueueServer) -> tuple[KueueDetector, Leadership]:
    leadership = Leadership(is_alone=False)
    settings = SimpleNamespace(place=True)
    context = SimpleNamespace(client=server, writer=server, metrics=Metrics(), leadership=leadership, settings=settings)
    return KueueDetector(context, server), leadership  # type: ignore[arg-type]


async def test_a_change_that_only_a_follower_saw_is_said_after_it_takes_over() -> None:
    server = KueueServer()
    check, leadership = checked(server)
    await check.check_features()
    server.has_gate = True
    await check.check_features()
    assert not server.events, "it does not lead"
    leadership.extend_lead(asyncio.get_running_loop().time() + 60)
    for _ in range(2):
        await check.check_features()
    assert server.events == [(ON, False)], "not as a change: who led before may have said it"
    server.has_gate = False
    await check.check_features()
    assert server.events[1:] == [(OFF, True)]


async def test_what_could_not_be_said_is_said_later() -> None:
    server = KueueServer()
    check, leadership = checked(server)
    leadership.extend_lead(asyncio.get_running_loop().time() + 60)
    server.is_busy = True
    await check.check_features()
    server.is_busy = False
    await check.check_features()
    assert server.events == [(OFF, False)]
