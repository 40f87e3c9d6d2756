"""Assumptions about kopf: its public names, and three private ones that one module uses.

These tests fail as soon as kopf changes them, and check that kopf leaves no trace on any object.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import kopf
import pytest
from aiohttp import web
from kopf._cogs.aiokits import aiotoggles
from kopf._cogs.clients import api, auth, watching
from kopf._cogs.clients.errors import APIClientError
from kopf._cogs.clients.watching import WatchingError
from kopf._cogs.structs.credentials import Vault, VaultKey
from kopf._cogs.structs.references import Resource, Selector
from kopf._core.reactor import observation

from operator_store import job
from tilecast import untrusted
from tilecast_operator import main
from tilecast_operator.kube import kopf_internals
from tilecast_operator.objects.view import View
from tilecast_operator.settings import Settings


def test_kopf_is_still_what_is_replaced_of_it() -> None:
    """Check what `kopf_internals` relies on."""
    asked = inspect.signature(watching.infinite_watch).parameters
    assert {"settings", "resource", "namespace", "operator_paused"} <= asked.keys()
    source = inspect.getsource(watching.infinite_watch)
    assert "continuous_watch(" in source and "sleep(settings.watching.reconnect_backoff)" in source
    assert watching.Bookmark.LISTED.name == "LISTED"
    assert "await request(" in inspect.getsource(api.stream)
    assert api.request.__module__ == kopf_internals.__name__, "kopf's own is replaced"
    made = aiotoggles.Toggle(False, name="a", condition=asyncio.Condition())
    assert (made.is_on(), made.name) == (False, "a")
    base = kopf_internals.Toggles.__mro__[1]
    names = ("make_toggle", "drop_toggle", "drop_toggles", "wait_for", "is_on")
    assert [name for name in names if not hasattr(base, name)] == []
    assert {"_condition", "_toggles"} <= vars(base(all)).keys()


def test_no_handler_needs_a_finalizer_or_keeps_state_on_objects() -> None:
    registry = kopf.get_default_registry()
    assert main.GROUP == "tilecast.dev"
    assert not registry._changing.get_all_handlers(), "change handlers write annotations of kopf's own"
    assert not registry._spawning.get_all_handlers(), "timers and daemons need finalizers"
    watched = {handler.selector.any_name for handler in registry._watching.get_all_handlers() if handler.selector}
    assert watched == {"gpupools", "trainingjobs", "poollearnings", "namespaces"}
    everything = [*registry._watching.get_all_handlers(), *registry._indexing.get_all_handlers()]
    assert not any(getattr(handler, "requires_finalizer", False) for handler in everything)


async def test_those_who_wait_are_woken_when_the_state_changes_and_not_before() -> None:
    toggles, looks = aiotoggles.ToggleSet(all), 0
    assert type(toggles) is kopf_internals.Toggles, "kopf's own is replaced"
    made = [await toggles.make_toggle() for _ in range(100)]

    async def wait() -> None:
        nonlocal looks
        async with toggles._condition:
            while not toggles.is_on():
                looks += 1
                await toggles._condition.wait()

    waiters = [asyncio.create_task(wait()) for _ in range(100)]
    await asyncio.sleep(0)
    for toggle in made:
        assert not any(waiter.done() for waiter in waiters)
        await toggles.drop_toggle(toggle)
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await asyncio.gather(*waiters)
    assert looks == 100, "each looked once before it slept"


def test_kinds_that_are_not_installed_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def look(*plurals: str) -> None:
        selectors = frozenset(Selector("absent.dev", "v1", plural) for plural in plurals)
        observation._disable_mismatched_selectors(resources=set(), selectors=selectors)

    for _ in range(47):
        look("jobsets")
    look("jobsets", "trainjobs")
    lines = [record.getMessage() for record in caplog.records if "Unresolved resources" in record.getMessage()]
    assert len(lines) == 2 and "trainjobs" in lines[1] and "trainjobs" not in lines[0]


def test_kopf_is_configured_to_leave_no_trace() -> None:
    main.configure_kopf(kopf_settings := kopf.OperatorSettings(), main.OWN)
    assert Settings() == main.OWN
    assert kopf_settings.peering.standalone and not kopf_settings.posting.enabled
    waits = list(itertools.islice(kopf_settings.networking.error_backoffs, 1000))
    assert waits == sorted(waits) and max(waits) <= 10, "an API server that is away for long is not given up"
    assert kopf_settings.queueing.worker_limit is None, "a limit below the number of nodes never starts"
    assert kopf_settings.process.ultimate_exiting_timeout < 30


LISTED = object()


def raw_event(kind: str | None, name: str, uid: str = "") -> dict[str, Any]:
    return {"type": kind, "object": {"kind": "Node", "metadata": {"name": name, "uid": uid or name}, "spec": {}}}


async def followed(watch: kopf_internals.Watch) -> list[tuple[str | None, str]]:
    """Return type and name of the events of a watch until it ends."""
    events = [event async for event in watch(resource="nodes", namespace=None)]
    return [(event["type"], event["object"]["metadata"]["name"]) for event in events if event is not LISTED]


def scripted(*rounds: Sequence[Any]) -> kopf_internals.Watch:
    """Return a watch that yields the next round of events at each call, and raises those that are exceptions."""
    left = list(rounds)

    async def watch(**_: Any) -> AsyncIterator[Any]:
        for event in left.pop(0):
            if isinstance(event, Exception):
                raise event
            yield event

    return watch


async def test_a_watch_that_ends_in_an_error_is_begun_anew() -> None:
    gone = APIClientError("gone", status=410, headers={})
    failures = [gone, WatchingError("broken"), RecursionError(), ValueError("no JSON")]
    rounds = [[raw_event(None, "a"), LISTED, failure] for failure in failures]
    watch = kopf_internals.watch_forever(
        scripted(*rounds, [OSError()]),
        LISTED,
        kopf_internals.FAILURES,
        3600.0,
        untrusted.empty_containers_below,
        reread_first_s=0.0,
    )
    for _ in failures:
        assert await followed(watch) == [(None, "a")]
    with pytest.raises(OSError):
        await followed(watch)
    assert watching.continuous_watch.__module__ == kopf_internals.__name__, "kopf's own is replaced"


async def test_a_watch_of_a_silent_cluster_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server lists nothing, and ends each watch without an event."""
    answers: list[str] = []
    watches = itertools.count(1)

    async def serve(request: web.Request) -> web.Response:
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})
        number = next(watches)
        if number == 3:
            raise web.HTTPInternalServerError
        if number == 6:
            stop.set_result(None)
        return web.Response()

    application = web.Application()
    application.router.add_get("/{path:.*}", serve)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    vault = Vault({VaultKey("a"): kopf.ConnectionInfo(server=address)})
    auth.vault_var.set(vault)
    settings = kopf.OperatorSettings()
    settings.networking.error_backoffs = 0.01
    monkeypatch.setattr(api, "request", kopf_internals.add_response_callback(api.request, answers.append))
    stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    pools = Resource("tilecast.dev", "v1alpha1", "gpupools", namespaced=False)
    try:
        watch = watching.continuous_watch(settings=settings, resource=pools, namespace=None, operator_pause_waiter=stop)
        assert [event async for event in watch] == [watching.Bookmark.LISTED], "nothing else is told"
    finally:
        await vault.close()
        await runner.cleanup()
    assert answers == ["gpupools"] * 5, "one was refused"
    assert api.request.__module__ == kopf_internals.__name__, "kopf's own is replaced"


async def test_a_list_tells_what_is_gone() -> None:
    watch = kopf_internals.watch_forever(
        scripted(
            [raw_event(None, "a"), raw_event(None, "b"), LISTED, raw_event("ADDED", "c"), raw_event("DELETED", "b")],
            [raw_event(None, "a"), LISTED],
            [raw_event(None, "a", "reborn"), LISTED],
            [LISTED],
        ),
        LISTED,
        (),
        3600.0,
        untrusted.empty_containers_below,
    )
    assert ("DELETED", "b") in await followed(watch)
    assert await followed(watch) == [(None, "a"), ("DELETED", "c")]
    assert await followed(watch) == [(None, "a"), ("DELETED", "a")]
    assert await followed(watch) == [("DELETED", "a")]


async def test_a_changed_crd_is_told_again_once_it_is_served() -> None:
    def crd(kind: str | None) -> dict[str, Any]:
        meta = {"name": "gpupools.tilecast.dev", "uid": "x"}
        return {"type": kind, "object": {"kind": "CustomResourceDefinition", "metadata": meta, "spec": {}}}

    async def watch(**_: Any) -> AsyncIterator[Any]:
        for event in (crd(None), LISTED, crd("ADDED"), raw_event("ADDED", "a")):
            yield event
        await asyncio.sleep(0.1)
        yield raw_event("ADDED", "b")

    enduring = kopf_internals.watch_forever(
        watch, LISTED, (), 3600.0, untrusted.empty_containers_below, repeats_s=(0.02, 0.2)
    )
    name = "gpupools.tilecast.dev"
    assert await followed(enduring) == [(None, name), ("ADDED", name), ("ADDED", "a"), ("ADDED", name), ("ADDED", "b")]


async def test_a_list_is_not_trusted_for_ever() -> None:
    events = [raw_event(None, "a"), raw_event(None, "b"), LISTED, raw_event("ADDED", "c"), raw_event("ADDED", "d")]
    eager = kopf_internals.watch_forever(scripted(events), LISTED, (), -1.0, untrusted.empty_containers_below)
    assert await followed(eager) == [(None, "a"), (None, "b")], "and yet is read to its end"
    patient = kopf_internals.watch_forever(scripted(events), LISTED, (), 3600.0, untrusted.empty_containers_below)
    assert len(await followed(patient)) == 4


async def test_a_watch_that_fails_again_and_again_is_begun_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(wait_s: float) -> None:
        waits.append(wait_s)

    monkeypatch.setattr(kopf_internals, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    is_well = False

    async def watch(**_: Any) -> AsyncIterator[Any]:
        if is_well:
            yield "LISTED"
        raise ValueError("forbidden")

    enduring = kopf_internals.watch_forever(watch, "LISTED", (ValueError,), 3600.0, untrusted.empty_containers_below)
    for _ in range(8):
        assert [event async for event in enduring(resource="nodes")] == []
    assert waits == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, 10.0]
    is_well = True
    assert [event async for event in enduring(resource="nodes")] == ["LISTED"]
    assert waits[-1] == 1.0, "a list that succeeded is a new beginning"


def test_documents_as_deep_as_the_api_server_takes_them_are_read() -> None:
    depth = 9_990
    body = job()
    body["spec"]["model"] = json.loads('{"huggingFace": {"config": ' + '{"a":' * depth + "1" + "}" * depth + "}}")
    untrusted.empty_containers_below(body)
    assert View.from_object(body).document
