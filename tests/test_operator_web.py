"""The pages beside the operator: what they show of documents, what they survive, and how they stand in a browser."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from browser import DESK, PHONE, open_browser
from tilecast.api.gpu_pool import GPUPoolStatus
from tilecast.api.queue_advice import QueueAdviceStatus
from tilecast.api.status import TrainingJobStatus
from tilecast.web.answers import Form
from tilecast_operator.kube.client import Connection
from tilecast_operator.kube.times import format_time
from tilecast_operator.kube.watch import WatchDelays
from tilecast_operator.objects.client import client
from tilecast_operator.search_process import SearchLimits
from tilecast_operator.server import HttpServer, ListenAddress
from tilecast_operator.web import pages, server
from tilecast_operator.web.pages import PageQuery
from tilecast_operator.web.rows import JobRow, PoolRow, QueueRow, read_count, read_number
from tilecast_operator.web.searches import FormSearches, answer_or_load
from tilecast_operator.web.server import start_server
from tilecast_operator.web.watches import ClusterState, TableWatch

QUICK = WatchDelays(between_s=0.01, retry_first_s=0.02, retry_most_s=0.05)
HOSTILE = "</td><script>alert(1)</script>\"'&\ud800"
WRITERS = {"waiting": pages.write_queue, "jobs": pages.write_jobs, "pools": pages.write_pools}
NOW_S = 1_800_000_000.0


def condition(kind: str, status: str, reason: str, message: str) -> dict[str, Any]:
    return {
        "type": kind, "status": status, "observedGeneration": 1, "lastTransitionTime": format_time(NOW_S),
        "reason": reason, "message": message,
    }  # fmt: skip


def make_pool(name: str, gpu: str, nodes: int, per_node: int, free: int | None = None) -> dict[str, Any]:
    gpus = {"total": nodes * per_node, "allocatable": nodes * per_node, **({} if free is None else {"free": free})}
    status = {
        "nodes": nodes,
        "gpus": gpus,
        "conditions": [condition("Ready", "True", "Known", "jobs can be advised onto it")],
        "error": {"rawRatio": 0.08, "calibratedRatio": 0.021},
        "summary": {
            "gpu": gpu, "shape": f"{nodes}x{per_node}", "price": "6.155 USD", "link": "infiniband-ndr-8x400",
            "origin": "Discovered", "reason": "Known",
        },
    }  # fmt: skip
    GPUPoolStatus.model_validate(status)
    return {"kind": "GPUPool", "metadata": {"name": name}, "spec": {"nodeType": "p5.48xlarge"}, "status": status}


def make_job(name: str, namespace: str = "team-a", measured_s: float | None = None, **queue: Any) -> dict[str, Any]:
    status: dict[str, Any] = {
        "conditions": [condition("Ready", "True", "Advised", "the advice is in the status")],
        "summary": {
            "pool": "h100", "gpus": "2x8", "plan": "fsdp16,mb1,ac-sel", "step": "8.2s", "range": "7.6-9.0s",
            "costPer1000Steps": "251 USD", "reason": "Advised",
        },
    }  # fmt: skip
    if measured_s is not None:
        step = {"target": 8.2, "lowerBound": 7.6, "upperBound": 9.0}
        status |= {
            "forecast": {"frozenAt": format_time(NOW_S), "pool": "h100", "gpus": 16, "stepSeconds": step},
            "observed": {"stepSeconds": measured_s, "samples": 12, "source": "put", "time": format_time(NOW_S)},
            "error": {"rawRatio": 8.9 / measured_s - 1, "calibratedRatio": 8.2 / measured_s - 1},
        }
    if queue:
        run = {"target": 36_000.0, "lowerBound": 33_000.0, "upperBound": 40_000.0}
        start_s = queue.pop("start_s")
        status["queue"] = {
            "pool": "h100", "gpus": 16, "start": format_time(start_s), "finish": format_time(start_s + 36_000),
            "earliestStart": format_time(start_s), "latestStart": format_time(start_s + 3_600), "runSeconds": run,
            "reason": "it ends first there", **queue,
        }  # fmt: skip
    TrainingJobStatus.model_validate(status)
    metadata = {"name": name, "namespace": namespace}
    return {"kind": "TrainingJob", "metadata": metadata, "spec": {"objective": "time"}, "status": status}


def make_queue(name: str = "cluster") -> dict[str, Any]:
    numbers = {"completionSeconds": 40_000.0, "worstCompletionSeconds": 90_000.0, "makespanSeconds": 100_000.0,
               "fairness": 1.4, "missed": 1}  # fmt: skip
    status = {
        "plannedAt": format_time(NOW_S), "policy": "completion", "jobs": {"waiting": 2, "running": 1, "refused": 1},
        "totals": numbers, "references": [{**numbers, "name": "ownBest", "completionSeconds": 61_000.0}],
        "gapRatio": 0.12,
        "refused": [{"job": "TrainingJob team-b/huge", "message": "fits nowhere", "remedy": "allow 64 GPUs"}],
    }  # fmt: skip
    QueueAdviceStatus.model_validate(status)
    return {"kind": "QueueAdvice", "metadata": {"name": name}, "spec": {}, "status": status}


def make_cluster(now_s: float = NOW_S) -> dict[str, list[dict[str, Any]]]:
    jobs = [
        make_job("llama-8b", measured_s=8.0, start_s=now_s - 3_600, position=0),
        make_job("llama-70b", measured_s=10.4),
        make_job("mixtral", start_s=now_s + 32_400, position=1),
        make_job("bert", namespace="team-b", start_s=now_s + 68_400, position=2),
        make_job("huge", namespace="team-b"),
    ]
    pools = [make_pool("h100", "h100-sxm", 4, 8, free=8), make_pool("l4", "l4", 3, 4)]
    return {"gpupools": pools, "trainingjobs": jobs, "queueadvices": [make_queue()]}


class FakeApi:
    """An API server with the objects of a cluster, lists by pages, and watches."""

    def __init__(self, objects: Mapping[str, list[dict[str, Any]]]) -> None:
        self.objects, self.methods, self.version, self.status = objects, set[str](), 10, 200
        self.watches: dict[str, list[asyncio.Queue[bytes]]] = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.methods.add(request.method)
        if self.status != 200:
            return web.json_response({"message": "no", "code": self.status}, status=self.status)
        plural = request.match_info["plural"]
        if "watch" not in request.query:
            begin, size = int(request.query.get("continue", "0")), int(request.query["limit"])
            items = [{**item, "kind": None} for item in self.objects[plural][begin : begin + size]]
            more = {"continue": str(begin + size)} if begin + size < len(self.objects[plural]) else {}
            return web.json_response({"metadata": {"resourceVersion": str(self.version), **more}, "items": items})
        response, events = web.StreamResponse(), asyncio.Queue[bytes]()
        self.watches.setdefault(plural, []).append(events)
        await response.prepare(request)
        while line := await events.get():
            await response.write(line)
        return response

    def send(self, plural: str, kind: str, body: Mapping[str, Any]) -> None:
        self.version += 1
        metadata = {**body["metadata"], "resourceVersion": str(self.version)}
        line = json.dumps({"type": kind, "object": {**body, "metadata": metadata}}).encode() + b"\n"
        for events in self.watches[plural]:
            events.put_nowait(line)

    def end_watches(self) -> None:
        for events in (one for many in self.watches.values() for one in many):
            events.put_nowait(b"")
        self.watches.clear()


@asynccontextmanager
async def run_api(objects: Mapping[str, list[dict[str, Any]]], most: int = 1_000) -> AsyncIterator[tuple[Any, Any]]:
    """Yield a fake API server, and the state that a client watches there."""
    fake = FakeApi(objects)
    application = web.Application()
    application.router.add_route("*", "/apis/tilecast.dev/v1alpha1/{plural}", fake.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api = client(10.0)
    api.log_in(lambda: Connection(f"http://127.0.0.1:{runner.addresses[0][1]}", {}, ssl.create_default_context()))
    state = ClusterState(api, QUICK, most)
    watching = asyncio.create_task(state.watch())
    try:
        yield fake, state
    finally:
        watching.cancel()
        fake.end_watches()
        await asyncio.gather(watching, return_exceptions=True)
        await api.close()
        await runner.cleanup()


async def wait_until(is_true: Any, what: str) -> None:
    for _ in range(500):
        if is_true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(what)


class NoSearches(FormSearches):
    """Searches without a process: the answer names the model."""

    def __init__(self) -> None:
        pass

    async def find(self, form: Any) -> tuple[int, str]:
        return 200, f"<p>asked for {len(form.model)} letters</p>"


@asynccontextmanager
async def run_pages(
    state: ClusterState, searches: FormSearches | None = None, hosts: tuple[str, ...] = ()
) -> AsyncIterator[str]:
    listening: HttpServer = await start_server(ListenAddress("127.0.0.1", 0), state, searches or NoSearches(), hosts)
    try:
        yield f"http://127.0.0.1:{listening.port}"
    finally:
        await listening.cleanup()


def fill(objects: Mapping[str, list[dict[str, Any]]], most: int = 1_000) -> ClusterState:
    """Return a state that has read objects, without a connection."""
    state = ClusterState(client(1.0), QUICK, most)
    for table, plural in zip(state.tables, ("gpupools", "trainingjobs", "queueadvices"), strict=True):
        assert table.plural == plural
        table._begin_list()
        for item in objects.get(plural, []):
            table._add_listed(item)
        table._record_answer()
        table._end_list()
    return state


class _Balance(HTMLParser):
    """Fails where an element is closed that is not open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on")], "no script in an attribute"
        if tag not in ("meta", "link", "input", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


FIRST = PageQuery()


def write_all(state: ClusterState, query: PageQuery = FIRST) -> dict[str, str]:
    writers = {**WRITERS, "forecasts": pages.write_forecasts}
    written = {name: write(state, query, NOW_S) for name, write in writers.items()}
    for place, job in enumerate(state.jobs.list_rows()[:5]):
        written[f"job {place}"] = pages.write_single_job(state, PageQuery(job.full_name), NOW_S)
    return written | {"play": pages.write_play(state, None, "", NOW_S)}


def test_the_pages_show_what_the_statuses_say() -> None:
    shown = write_all(fill(make_cluster()))
    assert all(not _Balance(text).open for text in shown.values())
    assert "24 of 32" in shown["pools"] and "+2.1%" in shown["pools"] and "6.155 USD" in shown["pools"]
    assert "<dt>GPUs</dt><dd>44</dd>" in shown["pools"] and "<dt>free GPUs</dt><dd>8</dd>" in shown["pools"]
    assert (
        "fsdp16,mb1,ac-sel" in shown["jobs"] and "8.2s, 7.6-9.0s" in shown["jobs"] and "5 TrainingJobs" in shown["jobs"]
    )
    assert "+2.5%" in shown["jobs"] and "-21.2%" in shown["jobs"]
    assert "<dt>inside the 90% range</dt><dd>50%</dd>" in shown["forecasts"] and shown["forecasts"].count("<svg") == 2
    off = (
        '<tr class="off"><th scope="row"><a href="job?q=team-a%2Fllama-70b"><span class="soft">team-a/</span>llama-70b'
    )
    assert off in shown["forecasts"]
    assert shown["waiting"].count("<svg") == 1 and "4 x 8" not in shown["waiting"]
    assert "team-a/mixtral: 16 GPUs, starts in 9h, ends in 19h (18.2h to 20.1h)" in shown["waiting"]
    assert "team-a/llama-8b: 16 GPUs, runs, ends in 9h" in shown["waiting"]
    assert (
        "each on its own best pool" in shown["waiting"]
        and "allow 64 GPUs" in shown["waiting"]
        and "12.0%" in shown["waiting"]
    )
    assert 'value="h100-sxm:4x8,l4:3x4"' in shown["play"]


def test_without_objects_the_pages_say_so() -> None:
    shown = write_all(fill({}))
    assert "There is no GPUPool" in shown["pools"] and "There is no TrainingJob" in shown["jobs"]
    assert "No step of a job was measured" in shown["forecasts"] and "queue.enabled" in shown["waiting"]
    assert 'value="h100-sxm:16,a100-80:16"' in shown["play"], "the example"
    assert "Not read yet" in pages.write_jobs(ClusterState(client(1.0)), PageQuery(), NOW_S)


def replace_texts(value: Any, text: str) -> Any:
    """Return a document in which every text but the types of conditions is `text`."""
    if isinstance(value, dict):
        return {
            key: item if key in ("type", "start", "finish") else replace_texts(item, text)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [replace_texts(item, text) for item in value]
    return text if isinstance(value, str) else value


def test_a_job_has_a_page_of_its_own_to_which_tables_lead() -> None:
    state = fill(make_cluster())
    jobs = state.jobs.list_rows()
    job = next(job for job in jobs if job.measured is not None)
    link = f'href="job?{escape(urlencode({"q": job.full_name}))}"'
    assert link in pages.write_jobs(state, FIRST, NOW_S) and link in pages.write_forecasts(state, FIRST, NOW_S)
    page = pages.write_single_job(state, PageQuery.from_values(job.full_name, ""), NOW_S)
    for text in (f"<h1>Job {job.full_name}</h1>", job.plan, job.range, "<h2>Measured</h2>", "Read again"):
        assert text in page, text
    planned = next(job for job in jobs if job.queue is not None)
    assert "<h2>In the queue</h2>" in pages.write_single_job(state, PageQuery(planned.full_name), NOW_S)
    assert "No TrainingJob has this name now" in pages.write_single_job(state, PageQuery("x/<script>"), NOW_S)
    longest = f"{'n' * 63}/{'j' * 253}"
    assert PageQuery.from_values(longest, "").search == longest


def test_jobs_of_the_plan_without_a_training_job_are_counted() -> None:
    objects = make_cluster()
    assert "no TrainingJob represents" not in pages.write_queue(fill(objects), FIRST, NOW_S)
    objects["queueadvices"][0]["status"]["jobs"]["waiting"] = 40
    assert "The plan has 38 more jobs, which no TrainingJob represents" in pages.write_queue(
        fill(objects), FIRST, NOW_S
    )


def test_a_job_whose_planned_start_has_passed_is_not_said_to_run() -> None:
    objects = {**make_cluster(), "trainingjobs": [make_job("late", start_s=NOW_S - 60, position=1)]}
    text = pages.write_queue(fill(objects), FIRST, NOW_S)
    assert "team-a/late: 16 GPUs, starts now, ends in" in text and "runs, ends" not in text


def test_an_error_of_the_form_names_its_fields_as_the_form_does() -> None:
    status, text = answer_or_load(Form(model="gpt2", gpus="h100-sxm:8", batch="64", seq="many"))
    assert status == 400 and "Sequence length" in text and "seq" not in text


def test_hostile_texts_stay_texts() -> None:
    hostile = {plural: [replace_texts(item, HOSTILE) for item in items] for plural, items in make_cluster().items()}
    for query in (PageQuery(), PageQuery(HOSTILE)):
        for name, text in write_all(fill(hostile), query).items():
            page = _Balance(text)
            assert page.tags.count("script") == (name == "play") and not page.open, name
            assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in write_all(fill(hostile))["jobs"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.data())
@pytest.mark.slow
def test_a_document_with_anything_in_it_is_shown(data: st.DataObject) -> None:
    def spoil(value: Any) -> Any:
        if data.draw(st.integers(0, 5)) == 0:
            return data.draw(JSON)
        if isinstance(value, dict):
            return {key: spoil(item) for key, item in value.items()}
        return [spoil(item) for item in value] if isinstance(value, list) else value

    spoilt = {
        plural: [{**item, "status": spoil(item["status"]), "spec": spoil(item["spec"])} for item in items[:2]]
        for plural, items in make_cluster().items()
    }
    for text in write_all(fill(spoilt)).values():
        assert not _Balance(text).open


@pytest.mark.parametrize("value", [None, True, "8", float("nan"), float("inf"), 10**400, -(10**400), [], {}])
def test_what_is_no_number_counts_as_absent(value: object) -> None:
    assert read_number(value) is None and read_count(value) is None


def test_a_row_keeps_no_long_text() -> None:
    long = {plural: [replace_texts(item, "x" * 100_000) for item in items] for plural, items in make_cluster().items()}
    rows = [
        *map(PoolRow.from_object, long["gpupools"]),
        *map(JobRow.from_object, long["trainingjobs"]),
        *map(QueueRow.from_object, long["queueadvices"]),
    ]
    texts = [getattr(row, field.name) for row in rows for field in fields(row)]
    assert max(len(text) for text in texts if isinstance(text, str)) <= 602
    assert all(len(text) < 60_000 for text in write_all(fill(long)).values())


def test_long_lists_are_turned_by_pages() -> None:
    jobs = [make_job(f"job-{index:04}", measured_s=8.0, start_s=NOW_S + index, position=index) for index in range(730)]
    state = fill({"trainingjobs": jobs}, most=700)
    for write in (pages.write_jobs, pages.write_forecasts, pages.write_queue):
        text = write(state, PageQuery(page=7), NOW_S)
        assert text.count('<th scope="row">') <= pages.ROWS and "page 7 of 7" in text
        assert "30 trainingjobs are not shown" in text
        assert "page 7 of 7" in write(state, PageQuery(page=99), NOW_S) and len(text) < 400_000
    found = pages.write_jobs(state, PageQuery("JOB-069", 1), NOW_S)
    assert "10 TrainingJobs" in found and "job-0691" in found and "Next" not in found
    assert "page=2&amp;q=o%3F" in pages._paginate(range(200), PageQuery("o\ud800"), "jobs")[1]
    both = pages.write_jobs(state, PageQuery("job&", 1), NOW_S)
    assert "No TrainingJob has this" in both
    assert 'href="jobs?page=2&amp;q=job"' in pages.write_jobs(state, PageQuery("job"), NOW_S)
    assert (
        PageQuery.from_values("", "-1")
        == PageQuery.from_values("", "x" * 9)
        == PageQuery.from_values("", "٣")
        == PageQuery()
    )
    assert len(PageQuery.from_values("x" * 10_000, "9" * 5_000).search) == pages.LONGEST_SEARCH


async def test_the_watches_follow_the_cluster_and_only_read() -> None:
    objects = make_cluster()
    objects["trainingjobs"] += [make_job(f"more-{index}") for index in range(450)]
    async with run_api(objects) as (fake, state):
        await wait_until(lambda: state.is_read and len(fake.watches) == 3, "the lists are read")
        assert len(state.jobs) == 455 and len(state.pools) == 2
        fake.send("trainingjobs", "ADDED", make_job("newest"))
        fake.send("trainingjobs", "DELETED", make_job("huge", namespace="team-b"))
        fake.send("trainingjobs", "MODIFIED", make_job("mixtral", measured_s=4.0))
        await wait_until(lambda: "measured" in str(state.jobs.list_rows()) and len(state.jobs) == 455, "changes")
        await wait_until(lambda: len(pages._list_measured(state)) == 3, "the change")
        names = {row.full_name for row in state.jobs.list_rows()}
        assert "team-a/newest" in names and "team-b/huge" not in names
        assert fake.methods == {"GET"}


async def test_the_pages_stay_while_the_api_server_is_away_and_say_since_when() -> None:
    async with (
        run_api(make_cluster()) as (fake, state),
        run_pages(state) as address,
        aiohttp.ClientSession() as session,
    ):
        await wait_until(lambda: state.is_read and len(fake.watches) == 3, "the lists are read")
        assert "Out of date" not in await read(session, f"{address}/jobs")
        fake.status = 500
        fake.end_watches()
        await wait_until(lambda: state.jobs.problem and state.pools.problem, "the fault is seen")
        text = await read(session, f"{address}/jobs")
        heard = format_time(state.jobs.heard_s or 0).replace("T", " ").removesuffix("Z")
        assert "answers with status 500 since" in text and f"{heard} UTC" in text and "llama-70b" in text
        assert await read(session, f"{address}/readyz") == "ok", "what was read stays of use"
        fake.status = 200
        await wait_until(lambda: not any(table.problem for table in state.tables), "it comes back")
        assert "Out of date" not in await read(session, f"{address}/jobs")


async def test_before_the_first_list_the_pages_are_not_ready() -> None:
    state = ClusterState(client(1.0))
    state.jobs._on_failure("Cannot connect to host 10.0.0.1:443")
    async with run_pages(state) as address, aiohttp.ClientSession() as session:
        async with session.get(f"{address}/readyz") as response:
            assert response.status == 503
        text = await read(session, f"{address}/jobs")
        assert "the API server does not answer, and nothing was read before" in text and "10.0.0.1" not in text
        assert await read(session, f"{address}/healthz") == "ok"


def test_more_objects_than_are_kept_are_counted() -> None:
    table = TableWatch(client(1.0), "TrainingJob", JobRow.from_object, QUICK, most=3)
    table._begin_list()
    for index in range(5):
        table._add_listed(make_job(f"job-{index}"))
    table._end_list()
    assert (len(table), table.left_out) == (3, 2)
    table._apply_change("ADDED", make_job("late"), b"")
    assert (len(table), table.left_out) == (3, 3)
    table._apply_change("DELETED", make_job("late"), b"")
    table._apply_change("DELETED", make_job("job-0"), b"")
    assert (len(table), table.left_out) == (2, 2)
    table._apply_change("MODIFIED", make_job("job-4"), b"")
    assert len(table) == 3


async def read(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as response:
        assert response.status == 200
        return await response.text()


async def test_every_answer_has_a_policy_and_no_script_of_its_own() -> None:
    async with run_pages(fill(make_cluster())) as address, aiohttp.ClientSession() as session:
        for path in ("/", "/jobs", "/forecasts", "/queue", "/play/", "/play/page.css", "/play/page.js", "/nothing"):
            async with session.get(f"{address}{path}") as response:
                policy = response.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy and "script-src 'self';" in policy and path
                assert response.headers["X-Content-Type-Options"] == "nosniff" and "Server" not in response.headers
                text = await response.text()
                assert response.status == (404 if path == "/nothing" else 200)
            if path in ("/", "/jobs", "/forecasts", "/queue"):
                assert "<script" not in text and len(text) < 60_000
                for target in re.findall(r"<nav.*?</nav>", text)[0].split('href="')[1:]:
                    await read(session, f"{address}/{target.partition(chr(34))[0]}")
            if path == "/play/":
                assert re.findall(r"<script(.*?)</script>", text) == [' src="page.js" defer>']
                await read(session, f"{address}/play/../jobs")
        async with session.get(f"{address}/play", allow_redirects=True) as response:
            assert response.status == 200 and response.url.path == "/play/"


async def test_nothing_can_be_written_and_no_other_name_is_answered() -> None:
    async with (
        run_pages(fill(make_cluster()), hosts=("Tilecast.example",)) as address,
        aiohttp.ClientSession() as session,
    ):
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            for path in ("/", "/jobs", "/queue"):
                async with session.request(method, f"{address}{path}") as response:
                    assert response.status == 405
        statuses = {}
        for host in (
            "elsewhere.example",
            "127.0.0.1.elsewhere.example",
            "tilecast.example:8443",
            "LOCALHOST",
            "[::1]:80",
        ):
            async with session.get(f"{address}/jobs", headers={"Host": host}) as response:
                statuses[host] = response.status
                assert response.status == 200 or "llama" not in await response.text()
        assert list(statuses.values()) == [400, 400, 200, 200, 200]
        for query in ("q=%ff", "q=%ED%A0%80", "page=%ff", "q=a&q=b", "q=%00"):
            async with session.get(URL(f"{address}/jobs?{query}", encoded=True)) as response:
                assert response.status == 200
        assert await send_without_host(address) == b"HTTP/1.1 400 Bad Request"
        async with session.get(f"{address}/healthz", headers={"Host": "10.1.2.3:8080"}) as response:
            assert response.status == 200, "the kubelet calls by address"


async def send_without_host(address: str) -> bytes:
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /jobs HTTP/1.0\r\n\r\n")
    await writer.drain()
    line = await reader.readline()
    writer.close()
    return line.strip().replace(b"HTTP/1.0", b"HTTP/1.1")


async def test_what_a_stranger_sends_is_bounded() -> None:
    async with run_pages(fill(make_cluster())) as address, aiohttp.ClientSession() as session:
        for data, status in (
            ({"pasted": "x" * (1 << 20)}, 400),
            ({"pasted": "x" * 50_000}, 400),
            (b"\xff\xfe", 400),
            ({f"field{index}": "x" for index in range(60)}, 400),
            ({"model": "gpt2"}, 200),
        ):
            async with session.post(f"{address}/play/answer", data=data) as response:
                assert response.status == status, data
                assert "Traceback" not in await response.text()
        async with session.post(f"{address}/play/", data={"model": HOSTILE[:30], "gpus": "l4:1"}) as response:
            text = await response.text()
            assert "asked for 30 letters" in text and "<script>" not in text and 'value="l4:1"' in text
        found = await asyncio.gather(*(read(session, f"{address}/forecasts") for _ in range(200)))
        assert len(set(map(len, found))) == 1


async def test_many_different_pages_are_written_or_refused_and_probes_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, release = threading.Event(), threading.Event()

    def write_slowly(*_: object) -> str:
        entered.set()
        assert release.wait(60)
        return "written"

    monkeypatch.setitem(server._PAGES, "/jobs", write_slowly)
    monkeypatch.setattr(server, "KEPT_S", 0.0)
    async with run_pages(fill(make_cluster())) as address, aiohttp.ClientSession() as session:

        async def ask(number: int) -> int:
            async with session.get(f"{address}/jobs?page={number}") as response:
                return response.status

        asked = [asyncio.create_task(ask(number)) for number in range(1, 81)]
        await wait_until(entered.is_set, "a page is being written")
        assert await read(session, f"{address}/healthz") == "ok"
        await wait_until(lambda: sum(task.done() for task in asked) == 80 - server.MOST_PAGES, "the others are refused")
        release.set()
        statuses = await asyncio.gather(*asked)
        assert statuses.count(200) == server.MOST_PAGES and statuses.count(503) == 80 - server.MOST_PAGES
        assert await ask(1) == 200, "it goes on"


async def test_a_slow_client_does_not_stop_others() -> None:
    async with run_pages(fill(make_cluster())) as address, aiohttp.ClientSession() as session:
        host, port = address.removeprefix("http://").split(":")
        _, slow = await asyncio.open_connection(host, int(port))
        slow.write(b"POST /play/answer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\nmodel=")
        await slow.drain()
        assert "llama-70b" in await read(session, f"{address}/jobs")
        slow.close()


@pytest.mark.slow
async def test_the_form_is_answered_by_a_process_that_is_replaced() -> None:
    searches = FormSearches(SearchLimits(60.0, 640))
    try:
        await searches.load()
        async with run_pages(fill(make_cluster()), searches) as address, aiohttp.ClientSession() as session:
            form = {"model": "gpt2", "seq": "1024", "batch": "64", "gpus": "h100-sxm:4x8,l4:3x4"}
            async with session.post(f"{address}/play/answer", data=form) as response:
                assert response.status == 200 and "<h2>gpt2</h2>" in await response.text()
            async with session.post(f"{address}/play/answer", data={**form, "model": "<b>"}) as response:
                assert response.status == 400 and "&lt;b&gt;" in await response.text()
            async with session.post(f"{address}/play/answer", data={**form, "pasted": "bash /etc/passwd"}) as response:
                assert response.status == 400 and "root:" not in await response.text()
            searches._process._process.kill()
            async with session.post(f"{address}/play/answer", data={**form, "batch": "32"}) as response:
                assert response.status == 200, "a new process"
    finally:
        searches.stop()


@pytest.mark.slow
async def test_a_search_that_takes_too_long_is_given_up() -> None:
    searches = FormSearches(SearchLimits(0.001, 640))
    try:
        async with (
            run_pages(fill({}), searches) as address,
            aiohttp.ClientSession() as session,
            session.post(f"{address}/play/answer", data={"model": "gpt2"}) as response,
        ):
            assert response.status == 503 and "took longer" in await response.text()
    finally:
        searches.stop()


@pytest.mark.slow
@pytest.mark.parametrize("width", [PHONE, DESK])
async def test_the_pages_stand_in_a_browser(width: int, tmp_path: Path) -> None:
    state = fill(make_cluster(time.time()))
    faults, grounds, asked = {}, set(), set()
    async with run_pages(state, hosts=("127.0.0.1",)) as address, open_browser(tmp_path) as browser:
        for stale in ("", "does not answer"):
            state.jobs.problem = stale
            for scheme in ("light", "dark"):
                await browser.set_window(width, scheme)
                for path in ("/", "/jobs", "/forecasts", "/queue", "/play/"):
                    await browser.show(f"{address}{path}")
                    grounds.add(await browser.evaluate("getComputedStyle(document.body).backgroundColor"))
                    asked |= set(
                        await browser.evaluate(
                            "performance.getEntriesByType('resource').map(one => new URL(one.name).host)"
                        )
                    )
                    assert await browser.evaluate("document.querySelectorAll('nav [aria-current=page]').length") == 1
                    if found := await browser.find_faults():
                        faults[path, scheme] = found
        assert not faults
        assert len(grounds) == 2, "light and dark"
        assert asked <= {address.removeprefix("http://")}, "no request beyond this machine"
        await browser.show(f"{address}/jobs?{urlencode({'q': HOSTILE[:-1]})}")
        assert await browser.evaluate("document.querySelector('[name=q]').value") == HOSTILE[:-1]
        await browser.evaluate("document.querySelector('nav a:last-child').click()")
        await browser.wait_for("location.pathname === '/play/' && document.readyState === 'complete'")
        assert await browser.evaluate("document.querySelector('[name=gpus]').value") == "h100-sxm:4x8,l4:3x4"
        await browser.evaluate("document.querySelector('button[type=submit]').click()")
        await browser.wait_for("document.querySelector('#answer').textContent.includes('asked for')")
