"""The desk for jobs of other kinds: advice on them, and mode Initial.

A job that waits for us is handled by a task of its own and let go within `HOLD_S`, advised or not; every other is
worked on by key, like a TrainingJob. Only the job itself says whether it was let go: a restart, a second operator or an
edit meanwhile find the same gate, or none.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tilecast import jobs
from tilecast.advise import Advice, Request, advise
from tilecast.api import training_job as trainingjob
from tilecast.api.base import API_VERSION
from tilecast.jobs import JOB_KINDS, Job, Placement, candidates, kueue
from tilecast.nodes import Node, NodesReport
from tilecast.spec import SpecError
from tilecast_operator import observe, place
from tilecast_operator.api import UNREACHABLE, ApiError, retry_s
from tilecast_operator.queue import KeyQueue
from tilecast_operator.report import annotations as marks
from tilecast_operator.report import events
from tilecast_operator.report.metrics import Metrics
from tilecast_operator.report.status import Applied, Refusal, Verdict, message, reason
from tilecast_operator.settings import Settings
from tilecast_operator.verdicts import Once, Question, is_passing
from tilecast_operator.view import MAX_INPUT, Document, canonical, stamp

log = logging.getLogger("tilecast")

HOLD_S = 6.0
"""How long a job that waits for us is kept at most, from when it is first seen; below the ten seconds that are promised
by what the last write takes."""
DECIDE_S = 5.0
"""How much of that may pass before it is known where the job goes. The rest is for writing it, which must not end
between the job and its Workload."""
OWNER_S = 3.0
"""How long a gated job that asks for nothing itself waits for the TrainingJob that names it."""
WORKLOAD_S = 2.0
"""How long a placed job waits for the Workload that Kueue makes of it. Made later, it is made of the job as placed."""
POLL_S = 0.2
"""Between looks at what another controller has yet to make, and between tries to let a job go."""
MOST_WAIT_S = 5.0
"""Longest between tries to let a job go."""
WRITES = 16
"""Requests that write, at once."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """A job."""

    kind: str
    namespace: str
    name: str

    @property
    def path(self) -> str:
        """Path of the job in the API."""
        return JOB_KINDS[self.kind].path(self.namespace, self.name)


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asks for advice on a job, and what."""

    question: Document
    """A TrainingJob document."""
    mode: trainingjob.Mode
    by: str = ""
    """Name of the TrainingJob; empty where the job asks by its label."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known of a TrainingJob's target."""

    name: str
    """Kind and name of the target."""
    verdict: Verdict
    applied: Applied
    has_started: bool = False
    """Whether the advice no longer matters to it: it runs, or is placed."""
    is_gone: bool = False
    """Whether there is no such job, now."""
    observed: str | None = None
    """Its annotation with a measured step."""
    trainer: Document = field(default_factory=dict)
    """Its status, of a TrainJob."""


class Client(Protocol):
    """What the desk needs of an API client."""

    def apply(self, path: str, document: Mapping[str, Any]) -> Awaitable[dict[str, Any]]:
        """Server-side apply."""

    def patch(self, path: str, operations: Sequence[Mapping[str, Any]]) -> Awaitable[dict[str, Any]]:
        """JSON patch."""

    def create(self, path: str, document: Mapping[str, Any]) -> Awaitable[dict[str, Any]]:
        """Create an object."""

    def get(self, path: str, query: Mapping[str, str] = ...) -> Awaitable[dict[str, Any]]:
        """Read an object."""


class Asker(Protocol):
    """What the desk needs of `Verdicts`."""

    def question(self, namespace: str, document: Document) -> Awaitable[Question]:
        """What a TrainingJob document asks."""

    def run(self, function: Callable[..., Any], *arguments: object) -> Awaitable[Any]:
        """Call a function in a thread."""


class _ChangedError(Exception):
    """The job is another than the one that was decided about."""


@dataclass(frozen=True, slots=True)
class _Decision:
    """What becomes of a held job."""

    outcome: str
    """`place.PLACED`, or the reason why it is let go as it is."""
    text: str = ""
    placement: Placement | None = None
    advice: Advice | None = None


OUTCOMES: Mapping[str, str] = {
    place.PLACED: "the node choice was written into the job before it started",
    "ModeAdvise": "mode Advise never changes a job",
    "ModeOff": "mode is Off: nothing but this status is written",
    "AlreadyStarted": "the job had started before it could be placed; create it suspended, or behind a gate of Kueue",
    "NotGated": "nothing holds the job for us; annotate it with tilecast.dev/mode: Initial while it is suspended, or "
    "create it with kueue.x-k8s.io/admission-gated-by: tilecast.dev/advisor",
    "Waiting": "the job is about to be placed and let go",
    "NotAllowed": "this operator may not place jobs; install the chart with jobs.place=true",
    "NotAsked": "nobody asks for advice on the job; label it tilecast.dev/enabled: true, or name it in a TrainingJob",
    "TooLate": "no advice came in time and the job was let go as it was; look at the operator's queue and log",
    "Refused": "the API server refused the node choice and the job was let go as it was",
    "CountNotWritable": "the advice has another number of GPUs than the job's pods can have; limit constraints.gpus",
    "Finished": "the job has ended",
}
"""Why a job was placed or not, in a sentence; what is not here is the reason of a `Refusal`."""


class Desk:
    """Every job of another kind that asks for advice. Belongs to one event loop.

    Args:
        settings: of the operator.
        client: of the API server.
        metrics: where what is written is counted.
        asker: reads questions, and has the threads that search.
        cluster: the pools as they are now (None until they are read) and the nodes by name.
        notify: called with namespace and name of a TrainingJob whose target has changed.
        advisor: `advise`.
        clock: Unix time.
    """

    def __init__(
        self,
        settings: Settings,
        client: Client,
        metrics: Metrics,
        asker: Asker,
        cluster: Callable[[], tuple[NodesReport | None, Mapping[str, Node]]],
        notify: Callable[[str, str], None],
        advisor: Callable[[Request, Sequence[Any]], Advice] = advise,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.queue: KeyQueue[Key] = KeyQueue(time.monotonic)
        self._settings = settings
        self._client = client
        self._metrics = metrics
        self._asker = asker
        self._cluster = cluster
        self._notify = notify
        self._advisor = advisor
        self._clock = clock
        self._documents: dict[Key, Document] = {}
        self._namespaces: dict[str, Mapping[str, str]] = {}
        self._asking: dict[Key, dict[str, Document]] = {}
        """TrainingJobs by the job that they name, then by their own name."""
        self._targets: dict[tuple[str, str], Key] = {}
        self._local_queues: dict[tuple[str, str], Document] = {}
        self._cluster_queues: dict[str, Document] = {}
        self._flavors: dict[str, Document] = {}
        self._runtimes: dict[str, tuple[float, Document | None]] = {}
        self._versions: dict[str, str] = {}
        self._advice: Once[Verdict] = Once(settings.advice_cache)
        self._holding: dict[tuple[Key, str], asyncio.Task[None]] = {}
        """By job and uid: what is decided about one job says nothing of the next of its name."""
        self._slots = asyncio.Semaphore(WRITES)
        self._told: dict[Key, str] = {}
        self._why: dict[Key, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._failures: dict[Key, int] = {}
        self._waiting: set[Key] = set()
        """Jobs whose queue is not known yet."""

    def start(self) -> None:
        """Start the workers."""
        self._tasks = [asyncio.create_task(self._work(), name=f"jobs-{n}") for n in range(self._settings.writers)]

    async def stop(self) -> None:
        """Stop everything; what is held then is let go by the next operator that starts."""
        every = [*self._tasks, *self._holding.values()]
        for task in every:
            task.cancel()
        await asyncio.gather(*every, return_exceptions=True)

    def ended(self) -> list[str]:
        """Names of workers that should be running and do not."""
        return [task.get_name() for task in self._tasks if task.done()]

    def see(self, body: Document) -> None:
        """Take note of a job that exists."""
        key = _key(body)
        self._metrics.watch.labels(JOB_KINDS[key.kind].plural).set(self._clock())
        document = _trimmed(body)
        known = self._documents.get(key)
        if known is not None and not _is_newer(document, known):
            return
        self._keep(key, document)

    def lose(self, body: Document) -> None:
        """Take note of a job that is gone."""
        key = _key(body)
        self._metrics.watch.labels(JOB_KINDS[key.kind].plural).set(self._clock())
        known = self._documents.get(key)
        if known is not None and known["metadata"].get("uid") != body["metadata"].get("uid"):
            return  # another of its name is there by now
        self._forget(key)
        self._tell_owners(key)

    def see_namespace(self, name: str, labels: Mapping[str, str]) -> None:
        """Take note of a namespace, whose label may ask for advice on every job in it."""
        before = self._namespaces.get(name, {}).get(jobs.ENABLED)
        self._namespaces[name] = dict(labels)
        if before != labels.get(jobs.ENABLED):
            self._due(key for key in self._documents if key.namespace == name)

    def lose_namespace(self, name: str) -> None:
        """Take note of a namespace that is gone."""
        self._namespaces.pop(name, None)

    def see_request(self, body: Document) -> None:
        """Take note of a TrainingJob, which may name a job."""
        metadata, spec = body["metadata"], kueue.mapping(body.get("spec"))
        place_ = (str(metadata.get("namespace", "")), str(metadata["name"]))
        target = _target(place_[0], spec.get("targetRef"))
        before = self._targets.get(place_)
        if before is not None and before != target:
            self._unasked(before, place_[1])
        if target is None:
            return
        document = {
            "apiVersion": API_VERSION,
            "kind": trainingjob.KIND,
            "metadata": {"name": place_[1], "creationTimestamp": str(metadata.get("creationTimestamp", ""))},
            "spec": dict(spec),
        }
        self._targets[place_] = target
        others = self._asking.setdefault(target, {})
        if others.get(place_[1]) != document:
            others[place_[1]] = document
            self._due([target])
            self._tell_owners(target)

    def lose_request(self, body: Document) -> None:
        """Take note of a TrainingJob that is gone."""
        metadata = body["metadata"]
        place_ = (str(metadata.get("namespace", "")), str(metadata["name"]))
        if (target := self._targets.pop(place_, None)) is not None:
            self._unasked(target, place_[1])

    def see_kueue(self, body: Document) -> None:
        """Take note of a LocalQueue, ClusterQueue or ResourceFlavor."""
        metadata, kept = body["metadata"], {"spec": body.get("spec") or {}, "status": body.get("status") or {}}
        if body["kind"] == "LocalQueue":
            self._local_queues[str(metadata.get("namespace", "")), str(metadata["name"])] = kept
        else:
            table = self._cluster_queues if body["kind"] == "ClusterQueue" else self._flavors
            table[str(metadata["name"])] = kept

    def lose_kueue(self, body: Document) -> None:
        """Take note of one that is gone."""
        metadata = body["metadata"]
        if body["kind"] == "LocalQueue":
            self._local_queues.pop((str(metadata.get("namespace", "")), str(metadata["name"])), None)
        else:
            table = self._cluster_queues if body["kind"] == "ClusterQueue" else self._flavors
            table.pop(str(metadata["name"]), None)

    def pools_changed(self) -> None:
        """Take note that every advice may be another."""
        self._advice.clear()
        self._due({*self._documents, *self._asking})

    async def answer(self, namespace: str, name: str, document: Document) -> Answer | None:
        """What a TrainingJob's target adds to its answer; None where it has none.

        Args:
            namespace: of the TrainingJob.
            name: of the TrainingJob.
            document: the TrainingJob.

        Raises:
            ApiError, OSError: the API server did not answer.
        """
        target = _target(namespace, kueue.mapping(document.get("spec")).get("targetRef"))
        if target is None:
            return None
        told = f"{target.kind}/{target.name}"
        first = self._asked_by(target)
        if first is not None and first != name:
            text = f"TrainingJob {first} names {target.kind} {target.name} too and is older"
            why = f"{text}; delete one of them, or change spec.targetRef"
            return Answer(told, Refusal("TargetConflict", why), ("False", "TargetConflict", why))
        found = self._documents.get(target) or await self._missing(target)
        if isinstance(found, Refusal):
            is_gone = found.reason == "TargetNotFound"
            return Answer(told, found, ("False", found.reason, found.message), is_gone=is_gone)
        job = await self._read(found)
        mode = _mode(document)
        verdict, _ = await self._verdict(job, Asked(document, mode, name), is_placed=mode == "Initial")
        is_settled = job.has_started or job.annotations.get(jobs.APPLIED) == place.PLACED
        observed = job.annotations.get(marks.OBSERVED)
        return Answer(
            told,
            verdict,
            self._applied(target, job, mode),
            is_settled,
            observed=None if observed is None else observed[:MAX_INPUT],
            trainer=found.get("status") or {} if target.kind == "TrainJob" else {},
        )

    # --- what is kept

    def _keep(self, key: Key, document: Document) -> None:
        known = self._documents.get(key)
        if known is not None and _uid(known) != _uid(document):
            self._forget(key)
        job = _known(document)
        if not (job.is_held or key in self._asking or _may_ask(job)):
            self._forget(key)
            return
        self._documents[key] = document
        place_ = (key, job.uid)
        if job.is_held and place_ not in self._holding and not job.is_owned:
            task = asyncio.create_task(self._hold(*place_), name=f"hold-{key.namespace}/{key.name}")
            self._holding[place_] = task
            task.add_done_callback(lambda done: self._held(*place_, done))
        self._due([key])
        if known is None or _relevant(known) != _relevant(document):
            self._tell_owners(key)

    def _forget(self, key: Key) -> None:
        for table in (self._documents, self._told, self._why, self._failures):
            table.pop(key, None)
        self._waiting.discard(key)

    def _due(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.queue.add(key)

    def _tell_owners(self, key: Key) -> None:
        for name in self._asking.get(key, ()):
            self._notify(key.namespace, name)

    def _unasked(self, target: Key, name: str) -> None:
        """A TrainingJob no longer names the job; another may be its turn."""
        others = self._asking.get(target, {})
        others.pop(name, None)
        if not others:
            self._asking.pop(target, None)
        self._due([target])
        self._tell_owners(target)

    def _asked_by(self, key: Key) -> str | None:
        """Name of the TrainingJob whose word counts for a job: the oldest."""
        others = self._asking.get(key) or {}
        return min(others, key=lambda name: (others[name]["metadata"]["creationTimestamp"], name), default=None)

    def _queue(self, job: Job) -> kueue.Queue | None:
        """The job's queue, where Kueue manages it and is read.

        Raises:
            SpecError: the queue leads nowhere.
        """
        if not job.queue or not self._settings.read_kueue:
            return None
        objects = kueue.Objects(self._local_queues, self._cluster_queues, self._flavors)
        return kueue.queue(objects, job.namespace, job.queue)

    def _asked(self, key: Key, job: Job) -> Asked | Refusal | None:
        """What somebody asks about a job; None if nobody does."""
        if job.annotations.get(jobs.IGNORE, "").lower() == "true":
            return None
        if (name := self._asked_by(key)) is not None:
            document = self._asking[key][name]
            return Asked(document, _mode(document), name)
        if not job.is_enabled(self._namespaces.get(key.namespace, {})):
            return None
        try:
            mode, spec = jobs.mode_of(job), jobs.described(job)
        except SpecError as error:
            return Refusal("InvalidAnnotations", str(error))
        question = {"apiVersion": API_VERSION, "kind": trainingjob.KIND, "metadata": {"name": key.name}, "spec": spec}
        return Asked(question, mode)

    async def _missing(self, key: Key) -> Document | Refusal:
        """A job that was not seen: as the API server has it, or why there is none."""
        try:
            return await self._client.get(key.path)
        except ApiError as error:
            if error.status == 403:
                text = f"the operator may not read {key.kind} {key.name}"
                return Refusal("TargetNotReadable", f"{text}; install the chart with jobs.enabled=true")
            if error.status != 404:
                raise
        kind = JOB_KINDS[key.kind]
        try:
            await self._client.get(f"/apis/{kind.api_version}")
        except ApiError as error:
            if error.status != 404:
                raise
            text = f"this cluster has no {kind.kind} of {kind.api_version}"
            return Refusal("TargetKindNotInstalled", f"{text}; install its controller, or correct spec.targetRef")
        text = f"there is no {kind.kind} {key.name} in namespace {key.namespace}"
        return Refusal("TargetNotFound", f"{text}; create it, or correct spec.targetRef")

    async def _read(self, document: Document) -> Job:
        """The job with what its runtime adds."""
        named = jobs.runtime_of(document)
        return jobs.read(document, None if named is None else await self._runtime(document, *named))

    async def _runtime(self, document: Document, kind: str, name: str) -> Document | None:
        namespace = document["metadata"].get("namespace", "")
        version = JOB_KINDS["TrainJob"].api_version
        path = f"/apis/{version}/clustertrainingruntimes/{name}"
        if kind != "ClusterTrainingRuntime":
            path = f"/apis/{version}/namespaces/{namespace}/trainingruntimes/{name}"
        expires_s, found = self._runtimes.get(path, (0.0, None))
        if time.monotonic() >= expires_s:
            try:
                found = await self._client.get(path)
            except ApiError as error:
                if error.status not in (403, 404):
                    raise
                found = None
            self._runtimes[path] = (time.monotonic() + self._settings.config_map_poll_s, found)
        return found

    # --- advice

    async def _verdict(
        self, job: Job, asked: Asked, *, is_placed: bool
    ) -> tuple[Verdict, candidates.Candidates | None]:
        """The answer about a job, and the pools that it may use."""
        question = await self._asker.question(job.namespace, asked.question)
        if isinstance(question.request, Refusal):
            refusal = question.request
            return (refusal if asked.by else replace(refusal, message=jobs.in_words(refusal.message))), None
        report, nodes = self._cluster()
        if report is None or not report.pools:
            return Refusal("NoPools", _why_no_pools(report)), None
        try:
            queue = self._queue(job)
        except SpecError as error:
            return Refusal("QueueNotFound", str(error)), None
        try:
            jobs.require_gpus(job)
            labels = [node.labels for node in nodes.values() if node.gpus or node.other_devices]
            found = candidates.candidates(job, report.pools, labels, queue, is_placed=is_placed)
            wanted = candidates.request(question.request, job, found, is_placed=is_placed)
        except SpecError as error:
            return Refusal("InvalidSpec", str(error)), None
        cached = (
            question.key,
            repr(wanted.constraints),
            repr(wanted.baseline),
            repr([item.pool for item in found.usable]),
        )
        digest = hashlib.sha256(repr(cached).encode()).digest()
        verdict = await self._advice.get(digest, lambda: self._search(wanted, found))
        if is_passing(verdict):
            self._advice.drop(digest)
        if isinstance(verdict, Refusal):
            return verdict, None
        return candidates.settled(verdict, found), found

    async def _search(self, wanted: Request, found: candidates.Candidates) -> Verdict:
        began = time.monotonic()
        try:
            advice: Advice = await self._asker.run(self._advisor, wanted, found.pools)
        except SpecError as error:
            return Refusal("InvalidSpec", str(error))
        except Exception as error:
            log.exception("advice failed")
            return Refusal(
                "InternalError", f"advice failed with {type(error).__name__}; the operator's log has the rest"
            )
        self._metrics.count_search(advice, time.monotonic() - began)
        return advice

    async def _work(self) -> None:
        while True:
            key = await self.queue.take()
            try:
                await self._advise(key)
                self._failures.pop(key, None)
            except (ApiError, *UNREACHABLE) as error:
                self._retry(key, error)
            except Exception:
                log.exception("%s: unexpected failure", key)
                self._retry(key, None)
            finally:
                self.queue.done(key)

    def _retry(self, key: Key, error: Exception | None) -> None:
        if isinstance(error, ApiError) and error.status == 404:
            self._forget(key)
            return
        attempt = self._failures[key] = self._failures.get(key, 0) + 1
        wait_s = retry_s(attempt, error, self._settings.retry_first_s, self._settings.retry_most_s)
        log.warning("%s: %s; again in %.1f s", key, error or "see above", wait_s)
        self._metrics.retries.inc()
        self.queue.add(key, wait_s)

    async def _advise(self, key: Key) -> None:
        """Annotate a job that is not held."""
        document = self._documents.get(key)
        if document is not None and (key, _uid(document)) in self._holding:
            return
        if document is None and key in self._asking:
            # It was of no interest when it was seen.
            document = _trimmed(await self._client.get(key.path))
            self._documents[key] = document
        if document is None:
            return
        if self._cluster()[0] is None:
            return  # all are due once the pools are read
        job = await self._read(document)
        own = {mark: value for mark, value in job.annotations.items() if mark in marks.KEYS}
        asked = self._asked(key, job)
        is_settled = job.has_started or job.annotations.get(jobs.APPLIED) == place.PLACED
        if job.is_finished or job.is_owned or (is_settled and own):
            return
        if isinstance(asked, Refusal):
            await self._say(key, job, asked)
            return
        if asked is None or asked.mode == "Off":
            if own:
                await self._annotate(key, job, {})
            return
        is_placed = asked.mode == "Initial"
        verdict, _ = await self._verdict(job, asked, is_placed=is_placed)
        if isinstance(verdict, Refusal) and verdict.reason == "QueueNotFound":
            # At the start a job may be seen before its queue; and one that is missing may be created.
            self.queue.add(key, OWNER_S if key not in self._waiting else self._settings.config_map_poll_s)
            if key not in self._waiting:
                self._waiting.add(key)
                return
        self._waiting.discard(key)
        wanted = {} if isinstance(verdict, Refusal) else marks.advice_annotations(verdict)
        if is_placed and job.has_started and jobs.APPLIED not in job.annotations:
            await self._post(
                key, job, events.Note("Warning", "NotPlaced", f"AlreadyStarted: {OUTCOMES['AlreadyStarted']}")
            )
            wanted[jobs.APPLIED] = "AlreadyStarted"
        elif jobs.APPLIED in job.annotations and (own or wanted):
            wanted[jobs.APPLIED] = job.annotations[jobs.APPLIED]
        if own != {mark: value for mark, value in wanted.items() if mark != jobs.APPLIED}:
            await self._annotate(key, job, wanted)
            self._metrics.count_advice(verdict, changed=bool(own))
        if own.get(marks.HASH) != wanted.get(marks.HASH) or isinstance(verdict, Refusal) or verdict.best is None:
            await self._say(key, job, verdict)
        if is_passing(verdict):
            raise OSError(message(verdict))

    async def _annotate(self, key: Key, job: Job, wanted: Mapping[str, str]) -> None:
        identity = {"name": key.name, "namespace": key.namespace, "uid": job.uid}
        document = {
            "apiVersion": job.kind.api_version,
            "kind": job.kind.kind,
            "metadata": {**identity, "annotations": dict(wanted)},
        }
        found = _trimmed(await self._counted(job.kind.plural, self._client.apply(key.path, document)))
        known = self._documents.get(key)
        if known is not None and _is_newer(found, known):
            # What somebody else wrote at the same time is in the answer, and its event is old news by now.
            self._keep(key, found)

    async def _say(self, key: Key, job: Job, verdict: Verdict) -> None:
        """The Event of a verdict, once for as long as it stays."""
        await self._post(key, job, _note(verdict))

    async def _post(self, key: Key, job: Job, note: events.Note) -> None:
        digest = f"{note.reason}\n{note.text}"
        if self._told.get(key) == digest:
            return
        now = stamp(self._clock())
        body = events.event(note, key.namespace, key.name, job.uid, key.kind, now, self._settings.instance)
        body["involvedObject"]["apiVersion"] = job.kind.api_version
        try:
            await self._counted("events", self._client.create(f"/api/v1/namespaces/{key.namespace}/events", body))
        except ApiError as error:
            if error.status != 409:
                log.warning("%s: Event not written: %s", key, error)
                return
        self._told[key] = digest

    async def _counted(self, resource: str, answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        with self._metrics.writing(resource):
            async with self._slots:
                return await answer

    # --- mode Initial

    def _held(self, key: Key, uid: str, task: asyncio.Task[None]) -> None:
        self._holding.pop((key, uid), None)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.error("%s: could not be let go: %r", key, error)
        if (document := self._documents.get(key)) is not None:
            self._keep(key, document)

    def _same(self, key: Key, uid: str) -> Document | None:
        """The job as it is now; None if it is gone, or another of its name is there."""
        document = self._documents.get(key)
        return document if document is not None and _uid(document) == uid else None

    async def _hold(self, key: Key, uid: str) -> None:
        """Place a job that waits for us, if that is wanted, and let it go in any case."""
        decision = _Decision("TooLate")
        try:
            async with asyncio.timeout(HOLD_S):
                decision = await self._decided_and_placed(key, uid)
        except (ApiError, *UNREACHABLE) as error:
            if not isinstance(error, TimeoutError):
                log.warning("%s: not placed: %s", key, error)
                decision = _Decision("Refused", text=f"{OUTCOMES['Refused']}: {error}")
        except Exception:
            log.exception("%s: not placed", key)
            decision = _Decision("InternalError", text="placing failed; the operator's log has the rest")
        await self._let_go(key, uid, decision)

    async def _decided_and_placed(self, key: Key, uid: str) -> _Decision:
        """What becomes of the job, its node choice written where there is one."""
        late = asyncio.get_running_loop().time() + DECIDE_S
        while True:
            document = self._same(key, uid)
            if document is None:
                return _Decision("Finished")
            async with asyncio.timeout_at(late):
                try:
                    decision = await self._decided(key, document)
                except SpecError as error:
                    return _Decision("InvalidSpec", text=str(error))
            if decision.placement is None:
                return decision
            try:
                await self._place(key, document, decision.placement, decision.advice)
            except _ChangedError:
                await self._renewed(key)
                continue
            return decision

    async def _decided(self, key: Key, document: Document) -> _Decision:
        job = await self._read(document)
        asked = self._asked(key, job)
        waited_s = 0.0
        while asked is None and waited_s < OWNER_S:
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S
            asked = self._asked(key, job)
        if asked is None:
            return _Decision("NotAsked")
        if isinstance(asked, Refusal):
            return _Decision(asked.reason, text=asked.message)
        if asked.mode != "Initial":
            return _Decision(f"Mode{asked.mode}")
        if not self._settings.place:
            return _Decision("NotAllowed")
        if job.is_finished or job.has_started:
            return _Decision("AlreadyStarted")
        while self._cluster()[0] is None:
            await asyncio.sleep(POLL_S)
        verdict, found = await self._verdict(job, asked, is_placed=True)
        while isinstance(verdict, Refusal) and verdict.reason == "QueueNotFound" and waited_s < OWNER_S:
            # At the start a job may be seen before its queue.
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S
            verdict, found = await self._verdict(job, asked, is_placed=True)
        if isinstance(verdict, Refusal) or verdict.best is None or found is None:
            return _Decision(reason(verdict), text=message(verdict))
        placement = candidates.placement(verdict.best, job, found)
        if placement is None:
            return _Decision("CountNotWritable")
        offer = verdict.best
        text = f"placed on {offer.pool.name}, {offer.nodes}x{offer.gpus_per_node} GPUs: {offer.reason}"
        return _Decision(place.PLACED, f"{text}{_against(verdict)}", placement, verdict)

    async def _place(self, key: Key, document: Document, placement: Placement, advice: Advice | None) -> None:
        """Write the node choice and the advice, and make the job's Workload ask for the same nodes.

        Raises:
            _ChangedError: the job is another by now.
            ApiError: the API server refuses it.
        """
        job = await self._read(document)
        if not job.is_held:
            return
        newer = not document.get("spec", {}).get("podTemplateOverrides") and await self._has_runtime_patches(key)
        wanted = place.placing(document, jobs.changes(document, job, placement, runtime_patches=newer))
        if wanted:
            document = _trimmed(await self._patched(key.path, job.kind.plural, wanted))
            self._documents[key] = document
        if advice is not None:
            await self._annotate(key, job, marks.advice_annotations(advice))
            self._metrics.count_advice(advice, changed=False)
        if job.queue:
            await self._admit(key, job, placement)

    async def _patched(self, path: str, resource: str, operations: Sequence[place.Operation]) -> dict[str, Any]:
        try:
            return await self._counted(resource, self._client.patch(path, operations))
        except ApiError as error:
            if error.status in (404, 409):
                raise _ChangedError from None
            raise

    async def _admit(self, key: Key, job: Job, placement: Placement) -> None:
        """Make the Workload that Kueue made for the job ask for the same nodes. Kueue may have read the job before it
        was placed and make the Workload only now, so that its absence is no leave to go."""
        version = await self._version("kueue.x-k8s.io")
        if version is None:
            return
        path = f"/apis/kueue.x-k8s.io/{version}/namespaces/{key.namespace}/workloads"
        waited_s = 0.0
        while waited_s < WORKLOAD_S:
            listed = await self._client.get(path, {"labelSelector": f"kueue.x-k8s.io/job-uid={job.uid}"})
            found = listed.get("items") or ()
            undecided = (item for item in found if not place.is_reserved(item))
            wanted = [(item, operations) for item in undecided if (operations := place.admitting(item, job, placement))]
            for item, operations in wanted:
                try:
                    await self._counted(
                        "workloads", self._client.patch(f"{path}/{item['metadata']['name']}", operations)
                    )
                except ApiError as error:
                    if error.status not in (404, 409):
                        raise
            if found and not wanted:
                return
            if not found:
                await asyncio.sleep(POLL_S)
                waited_s += POLL_S

    async def _let_go(self, key: Key, uid: str, decision: _Decision) -> None:
        """Take our gate off, whatever it takes; then say what became of the job."""
        wait_s = POLL_S
        while True:
            document = self._same(key, uid)
            if document is None:
                return
            try:
                job = _known(document)
                wanted = place.releasing(document, job, decision.outcome)
                if not wanted:
                    break
                found = await self._patched(key.path, job.kind.plural, wanted)
                self._documents[key] = _trimmed(found)
                text = decision.text or OUTCOMES.get(decision.outcome, decision.outcome)
                is_placed = decision.outcome == place.PLACED
                note = events.Note("Normal", "Placed", text) if is_placed else None
                note = note or events.Note("Warning", "NotPlaced", f"{decision.outcome}: {text}"[: events.MAX_NOTE])
                self._why[key] = text
                self._tell_owners(key)
                await self._post(key, job, note)
                return
            except _ChangedError:
                await self._renewed(key)
            except Exception as error:
                log.warning("%s: not let go yet: %r", key, error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, MOST_WAIT_S)
                await self._renewed(key)

    async def _renewed(self, key: Key) -> None:
        """Read the job anew; one that is gone is forgotten."""
        try:
            self._keep(key, _trimmed(await self._client.get(key.path)))
        except ApiError as error:
            if error.status == 404:
                self._forget(key)
        except UNREACHABLE as error:
            log.warning("%s: cannot be read: %s", key, error)

    async def _version(self, group: str) -> str | None:
        """The preferred version of an API group; None where it is not served."""
        if group not in self._versions:
            try:
                found = await self._client.get(f"/apis/{group}")
            except ApiError as error:
                if error.status == 404:
                    return None
                raise
            self._versions[group] = str(found["preferredVersion"]["version"])
        return self._versions[group]

    async def _has_runtime_patches(self, key: Key) -> bool:
        """Whether the TrainJobs of this cluster have `runtimePatches` (Trainer 2.2 and later)."""
        if key.kind != "TrainJob":
            return True
        if "runtimePatches" not in self._versions:
            found = await self._client.get(f"/openapi/v3/apis/{JOB_KINDS[key.kind].api_version}")
            self._versions["runtimePatches"] = "yes" if '"runtimePatches"' in json.dumps(found) else ""
        return bool(self._versions["runtimePatches"])

    def _applied(self, key: Key, job: Job, mode: trainingjob.Mode) -> Applied:
        """The condition Applied of a TrainingJob with this target."""
        if mode != "Initial":
            return "False", f"Mode{mode}", OUTCOMES[f"Mode{mode}"]
        outcome = job.annotations.get(jobs.APPLIED)
        if outcome is None:
            held = "Waiting" if job.is_held else "AlreadyStarted" if job.has_started else "NotGated"
            outcome = held if self._settings.place or held != "NotGated" else "NotAllowed"
        text = self._why.get(key) or OUTCOMES.get(outcome, "the job was let go as it was; see its Events")
        return "True" if outcome == place.PLACED else "False", outcome, text


def _key(body: Document) -> Key:
    metadata = body["metadata"]
    return Key(str(body["kind"]), str(metadata.get("namespace", "")), str(metadata["name"]))


def _uid(document: Document) -> str:
    return str(document["metadata"].get("uid", ""))


def _known(document: Document) -> Job:
    """What is read of a job, without its pods where those cannot be read: it may hold a gate of ours all the same."""
    try:
        return jobs.read(document)
    except SpecError as error:
        log.warning("%s: %s", _key(document), error)
        return jobs.bare(document)


def _target(namespace: str, reference: object) -> Key | None:
    kind = kueue.mapping(reference).get("kind")
    if not isinstance(reference, Mapping) or not isinstance(kind, str) or kind not in JOB_KINDS:
        return None
    return Key(kind, namespace, str(reference.get("name", "")))


def _mode(document: Document) -> trainingjob.Mode:
    """Mode of a TrainingJob; what is wrong with it otherwise, its own status says."""
    found = kueue.mapping(document.get("spec")).get("mode")
    return next((mode for mode in trainingjob.MODES if mode == found), "Off" if found is False else "Advise")


_METADATA = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "labels", "annotations")


def _trimmed(body: Document) -> Document:
    """A job without what is not read of it."""
    metadata = {key: body["metadata"][key] for key in (*_METADATA, "ownerReferences") if key in body["metadata"]}
    kept = {"apiVersion": body.get("apiVersion", ""), "kind": body.get("kind", ""), "metadata": metadata}
    found: Document = json.loads(
        json.dumps({**kept, "spec": body.get("spec") or {}, "status": body.get("status") or {}}, default=dict)
    )
    return found


def _may_ask(job: Job) -> bool:
    """Whether a job could be advised by a label: it has not ended, and asks for GPUs or may do so in its runtime."""
    is_marked = jobs.ENABLED in job.labels or jobs.MODEL in job.annotations
    return not job.is_finished and not job.is_owned and bool(job.gpus or is_marked or job.kind.kind == "TrainJob")


def _relevant(document: Document) -> bytes:
    """What of a job matters to the TrainingJob that names it."""
    metadata, status = document["metadata"], document.get("status") or {}
    own = {mark: value for mark, value in (metadata.get("annotations") or {}).items() if mark not in marks.KEYS}
    states = [(item.get("type"), item.get("status")) for item in status.get("conditions") or ()]
    told = observe.trainer_metrics(status)
    return canonical([metadata.get("uid"), own, metadata.get("labels"), document.get("spec"), states, told])


def _is_newer(document: Document, known: Document) -> bool:
    """Whether this is a later state, be it of another object of the name; where that cannot be told, yes."""
    versions = [str(item["metadata"].get("resourceVersion", "")) for item in (document, known)]
    is_ordered = all(version.isdigit() for version in versions)
    return not is_ordered or int(versions[0]) > int(versions[1])


def _why_no_pools(report: NodesReport | None) -> str:
    if report is None:
        return "nodes are not read yet"
    try:
        return f"{len(report.require())} pools"
    except SpecError as error:
        return str(error)


def _against(verdict: Verdict) -> str:
    """How much better an advice is than what the job asks for by itself."""
    if isinstance(verdict, Refusal) or verdict.best is None or verdict.baseline is None:
        return ""
    own, best = verdict.baseline, verdict.best
    asked = f"{own.nodes}x{own.gpus_per_node} {own.pool.name}"
    factor = own.step_s / best.step_s
    if own.pool == best.pool and own.gpus == best.gpus:
        return f"; that is where it would have run by itself ({asked})"
    told = f"{factor:.1f}x faster than" if factor >= 1 else f"{1 / factor:.1f}x slower than"
    return f"; {told} the {asked} that it asks for"


def _note(verdict: Verdict) -> events.Note:
    """The Event of a verdict."""
    found = events.note(verdict, {}, {"reason": reason(verdict)}) or events.Note("Normal", reason(verdict), "")
    return replace(found, text=f"{found.text}{_against(verdict)}"[: events.MAX_NOTE])
