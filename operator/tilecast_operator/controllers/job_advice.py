"""Advice on jobs of all kinds except TrainingJob, within the limits of the job's pods and queue."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tilecast import jobs, manifests
from tilecast.advice import Request
from tilecast.api import training_job
from tilecast.jobs import Job, candidates, kueue
from tilecast.nodes import NodesReport
from tilecast.spec import SpecError
from tilecast_operator.controllers.advisor_client import AdvisorClient
from tilecast_operator.controllers.contention import UNSIGNED, WriteContention
from tilecast_operator.controllers.planned_jobs import QueuePositions
from tilecast_operator.controllers.requests import JobRequestIndex, read_mode
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.kube.client import ApiError
from tilecast_operator.kube.documents import make_apply_document
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.objects.documents import ADVICE_KEYS, make_training_job
from tilecast_operator.objects.kinds import KINDS
from tilecast_operator.objects.view import FOREIGN, annotations_digest, encode_canonical, select_operator_annotations
from tilecast_operator.observed import reports
from tilecast_operator.outcome import AdviceOutcome, AdviceRefusal, decline_without_pools
from tilecast_operator.report.advice import make_advice_annotations
from tilecast_operator.search_inputs import SearchInputs


@dataclass(frozen=True, slots=True)
class AdviceRequest:
    """Request for advice on a job, made by a TrainingJob or by a label of the job."""

    question: Document
    """TrainingJob document with the request."""
    mode: training_job.Mode
    requested_by: str = ""
    """Name of the TrainingJob. Empty if the request is a label of the job."""


@dataclass(frozen=True, slots=True)
class JobSearchInputs:
    """Inputs of the search for a job's plans, limited to the pools that the job's pods and queue allow."""

    question: SearchInputs
    request: Request
    choice: candidates.JobCandidates
    queue: str = ""
    """ClusterQueue of the job. Empty if Kueue does not manage the job."""
    flavors: tuple[str, ...] = ()
    """Names of the queue's flavors, in the order in which Kueue tries them."""


class _CommandReading(NamedTuple):
    """Fields of a `Job` that were read from its command."""

    said: Mapping[str, Any] = {}
    why_unread: str = ""
    reading: str = ""


MAX_CONFIG_MAPS = 8
"""Maximum number of ConfigMaps that are read for one job."""
MAX_READINGS = 8192
"""Most jobs whose read commands are cached."""
MAX_OBJECTS = 1024
"""Most training runtimes, claims and device classes that are cached. Users can name any number of them."""


class JobAdvisor:
    """Advisor on jobs of all kinds except TrainingJob. Belongs to one event loop."""

    def __init__(
        self,
        context: SharedContext,
        answers: AdvisorClient,
        requests: JobRequestIndex,
        planned: QueuePositions,
        contention: WriteContention,
    ) -> None:
        self._context = context
        self._contention = contention
        self.answers = answers
        self._requests = requests
        self.planned = planned
        """Position of each job in the queue plan."""
        self._objects: dict[str, tuple[float, Document | None]] = {}
        self._readings: dict[str, tuple[float, bytes, _CommandReading]] = {}
        """What was read from the command of each job, by UID, with its expiry time and a digest of the job."""

    async def read_job(self, document: Document) -> Job:
        """Return a job, read from its document, its TrainingRuntime and its ResourceClaims.

        Raises:
            SpecError: The document does not have the form of its kind, or a claim cannot be read.
            ApiError, OSError: The API server does not answer.
        """
        named = jobs.find_training_runtime(document)
        runtime = None if named is None else await self._fetch_cached(_make_runtime_path(document, *named))
        job = jobs.read_job(document, runtime)
        job = await self._resolve_claims(job) if job.has_claims else job
        return replace(job, **(await self._read_command(job, document, runtime))._asdict())

    async def _read_command(self, job: Job, document: Document, runtime: Document | None) -> _CommandReading:
        """Return the model and training that a job's command contains. Return an empty reading if nothing must be read.

        Nothing must be read if the job requests no advice, if another job owns it, or if its annotations state model
        and training. ConfigMaps that the pods mount are read only if the settings allow it.
        """
        annotations = job.annotations
        is_stated = annotations.get(jobs.MODEL, "").strip() and jobs.TRAINING in annotations
        namespace = self._context.cache.namespaces.get(Key("Namespace", "", job.namespace))
        if is_stated or job.is_owned or not job.is_enabled({} if namespace is None else namespace.value.labels):
            return _CommandReading()
        digest = hashlib.sha256(encode_relevant_fields(document) + encode_canonical(runtime or {})).digest()
        expires_s, seen, reading = self._readings.get(job.uid, (0.0, b"", _CommandReading()))
        if seen == digest and time.monotonic() < expires_s:
            return reading
        config_maps = dict[str, Document]()
        if self._context.settings.read_pod_config_maps:
            for name in sorted(manifests.list_config_maps(document, runtime))[:MAX_CONFIG_MAPS]:
                found = await self._fetch(f"/api/v1/namespaces/{job.namespace}/configmaps/{name}")
                if found is not None:
                    config_maps[name] = found
        has_model = bool(annotations.get(jobs.MODEL, "").strip())
        reading = await asyncio.to_thread(_read_manifest, document, runtime, config_maps, has_model=has_model)
        self._readings.pop(job.uid, None)
        while len(self._readings) >= MAX_READINGS:
            del self._readings[next(iter(self._readings))]
        self._readings[job.uid] = (time.monotonic() + self._context.settings.config_map_poll_s, digest, reading)
        return reading

    async def _resolve_claims(self, job: Job) -> Job:
        """Return a copy of a job with the GPUs that its ResourceClaims request."""
        objects = dict[tuple[str, str], Document]()
        # The second round reads the device classes that the claims name.
        for _ in range(2):
            for kind, name in sorted(jobs.find_claim_objects(job, objects) - objects.keys()):
                namespace = "" if kind == "DeviceClass" else job.namespace
                document = await self._fetch_cached(KINDS[kind].path(namespace, name))
                if document is not None:
                    objects[kind, name] = {**document, "kind": kind}
        return jobs.resolve_claims(job, objects)

    def find_advice_request(self, key: Key, job: Job) -> AdviceRequest | AdviceRefusal | None:
        """Return the request for advice on a job, or why it is declined. Return None without a request."""
        if job.annotations.get(jobs.IGNORE, "").lower() == "true":
            return None
        if (request := self._requests.find_requester(key)) is not None:
            name, document = request
            if (refusal := self._context.find_quarantine(Key(training_job.KIND, key.namespace, name))) is not None:
                return refusal
            return AdviceRequest(document, read_mode(document), name)
        namespace = self._context.cache.namespaces.get(Key("Namespace", "", key.namespace))
        if not job.is_enabled({} if namespace is None else namespace.value.labels):
            return None
        try:
            mode, spec = jobs.read_mode(job), jobs.read_training_spec(job.annotations, job.said, job.why_unread)
        except SpecError as error:
            return AdviceRefusal("InvalidAnnotations", str(error))
        return AdviceRequest(make_training_job(key.name, spec), mode)

    async def read_search_inputs(
        self, job: Job, advice_request: AdviceRequest, *, writes_advice: bool
    ) -> JobSearchInputs | AdviceRefusal:
        """Return the inputs of the search for a job's plans, or why there is no search.

        `advise_job` describes the arguments.
        """
        names = {job.kind.kind: job.name, training_job.KIND: advice_request.requested_by}
        keys = [Key(kind, job.namespace, name) for kind, name in names.items() if name]
        question = await self.answers.read_search_inputs(keys, advice_request.question, is_held=job.is_held)
        if isinstance(question.request, AdviceRefusal):
            refusal = question.request
            return (
                refusal
                if advice_request.requested_by
                else replace(refusal, message=jobs.move_message_to_annotation(refusal.message))
            )
        report = self.answers.pools.find_report(job.namespace)
        if report is None or not report.pools:
            return decline_without_pools(report)
        try:
            queue = self._find_queue(job)
        except SpecError as error:
            return AdviceRefusal("QueueNotFound", str(error))
        try:
            jobs.require_gpus(job)
            pools, labels = self.answers.advisor.list_pools(question), self._list_gpu_node_labels(job, report)
            devices = report.devices if self._context.settings.read_resource_slices else None
            choice = candidates.find_candidates(job, pools, labels, queue, devices, writes_advice=writes_advice)
            request = candidates.build_job_request(question.request, job, choice, writes_advice=writes_advice)
        except SpecError as error:
            return AdviceRefusal("InvalidSpec", str(error))
        if queue is None:
            return JobSearchInputs(question, request, choice)
        return JobSearchInputs(question, request, choice, queue.cluster_queue, tuple(one.name for one in queue.flavors))

    async def advise_job(
        self, job: Job, advice_request: AdviceRequest, *, writes_advice: bool
    ) -> tuple[AdviceOutcome, candidates.JobCandidates | None]:
        """Return the advice outcome of a job, and the pools that the job may use. Without advice, the pools are None.

        Args:
            job: The job from `read_job`.
            advice_request: The request for advice.
            writes_advice: Whether the job is to be placed.
        """
        open_question = await self.read_search_inputs(job, advice_request, writes_advice=writes_advice)
        if isinstance(open_question, AdviceRefusal):
            return open_question, None
        question, request, choice = open_question.question, open_question.request, open_question.choice
        usable = [item.pool for item in choice.usable]
        answer = await self.answers.search(question, request, choice.pools, usable, job.namespace)
        if isinstance(answer, AdviceRefusal):
            return answer, None
        advice = question.own.add_notes(candidates.order_offers_by_quota(answer, choice))
        return self.planned.prefer_planned_pool(Key(job.kind.kind, job.namespace, job.name), advice), choice

    async def must_yield(
        self, key: Key, document: Document, advice_request: AdviceRequest, outcome: AdviceOutcome
    ) -> bool:
        """Return whether to leave a job alone for now, because another release of Tilecast annotates it.

        If any other client has changed the annotations, the result is False, so that they are corrected.

        Args:
            key: Key of the job.
            document: The job as it was seen.
            advice_request: The request for advice.
            outcome: The advice outcome of the request.
        """
        shown = _read_shown_annotations(document)
        # If there are none, a person may have removed them. Another operator that did so finds ours next and yields.
        if not shown or FOREIGN in document or shown == _make_advised_annotations(outcome):
            return False
        uid, digest = document["metadata"]["uid"], annotations_digest(shown)
        return await self._contention.must_yield(key, uid, UNSIGNED, _hash_request(document, advice_request), digest)

    def record_write(self, key: Key, document: Document, advice_request: AdviceRequest, outcome: AdviceOutcome) -> None:
        """Record that advice was written to a job, if it has changed the job's annotations.

        `must_yield` describes the arguments.
        """
        if (advised := _make_advised_annotations(outcome)) != _read_shown_annotations(document):
            self._contention.record_write(key, _hash_request(document, advice_request), annotations_digest(advised))

    def _find_queue(self, job: Job) -> kueue.LocalQueue | None:
        """Return the Kueue queue of a job, or None if Kueue does not manage the job or queues are not read.

        Raises:
            SpecError: The LocalQueue, its ClusterQueue or a quota of GPUs does not exist.
        """
        # Kueue counts the devices of claims under its own names (deviceClassMappings), which nobody may read.
        if not job.queue or job.has_claims or not self._context.settings.read_kueue:
            return None
        objects = kueue.KueueObjects(
            {(key.namespace, key.name): document for key, document in self._context.cache.local_queues.items()},
            {key.name: document for key, document in self._context.cache.cluster_queues.items()},
            {key.name: document for key, document in self._context.cache.flavors.items()},
        )
        return kueue.find_queue(objects, job.namespace, job.queue)

    async def annotate(
        self, key: Key, job: Job, annotations: Mapping[str, str], resource_version: str | None = None
    ) -> None:
        """Replace Tilecast's annotations on a job. If there is advice, add what was read from the job's command.

        Raise the errors of `Writer.apply_fields`.

        Args:
            key: Key of the job.
            job: The job as it was seen.
            annotations: All annotations of Tilecast. Others that an earlier call wrote are removed.
            resource_version: Resource version that the job must have, or None for any.
        """
        if annotations and job.reading:
            annotations = {**annotations, jobs.READING: job.reading}
        fields = make_apply_document(
            key,
            KINDS[key.kind].api_version,
            uid=job.uid,
            resource_version=resource_version,
            annotations=annotations,
        )
        # The response contains what others wrote at the same time; the event of that write is outdated by now.
        body = await self._context.writer.apply_fields(key, fields)
        if self._context.cache.jobs.get(key) is not None:
            self._context.cache.jobs.put_object(body)

    def _list_gpu_node_labels(self, job: Job, report: NodesReport) -> list[Mapping[str, str]]:
        """Return the labels of each GPU node that a job could use.

        A node may offer its GPUs only by ResourceClaims, without an extended resource. A job with claims could use each
        such node that is in a pool.
        """
        members = {name for entry in report.entries for name in entry.members} if job.has_claims else set[str]()
        nodes = self._context.cache.nodes.values()
        return [node.labels for node in nodes if node.gpus or node.other_devices or node.name in members]

    async def _fetch_cached(self, path: str) -> Document | None:
        """Return the object at an API path, from a short-lived cache or the API server.

        Return None if it cannot be read.
        """
        expires_s, document = self._objects.get(path, (0.0, None))
        if time.monotonic() >= expires_s:
            document = await self._fetch(path)
            self._objects.pop(path, None)
            while len(self._objects) >= MAX_OBJECTS:
                del self._objects[next(iter(self._objects))]
            self._objects[path] = (time.monotonic() + self._context.settings.config_map_poll_s, document)
        return document

    async def _fetch(self, path: str) -> Document | None:
        """Return the object at an API path, or None if it cannot be read."""
        try:
            return await self._context.client.get(path)
        except ApiError as error:
            if error.status not in (403, 404):
                raise
            return None


def _read_manifest(
    document: Document, runtime: Document | None, config_maps: Mapping[str, Document], *, has_model: bool
) -> _CommandReading:
    """Return the fields that were read from a job's command, or the reason why none could be read.

    `read_manifest` describes the arguments.
    """
    try:
        found = manifests.read_manifest(document, runtime, config_maps, has_model=has_model)
    except SpecError as error:
        text = f"{error.field}: {error.problem}"
        unread = manifests.list_config_maps(document, runtime) - config_maps.keys()
        if any(f"ConfigMap {name}," in text for name in unread):
            text += " (the chart's jobs.readConfigMaps and rbac.readConfigMaps let the operator read it)"
        return _CommandReading(why_unread=text)
    if found.model is None and not has_model:
        # The annotation may also be left out if the pod mounts the file beside its model's path.
        remedy = f"put its config.json in a ConfigMap and annotate {jobs.MODEL}: configmap:NAME/config.json"
        text = f"{found.launch.model_name} is no preset, and the operator does not ask the Hugging Face Hub"
        return _CommandReading(why_unread=f"{found.where}: {text} ({remedy})")
    return _CommandReading({"model": found.model, "training": found.training}, reading=found.format_annotation())


def _make_runtime_path(document: Document, kind: str, name: str) -> str:
    namespace, version = document["metadata"].get("namespace", ""), KINDS["TrainJob"].api_version
    if kind == "ClusterTrainingRuntime":
        return f"/apis/{version}/clustertrainingruntimes/{name}"
    return f"/apis/{version}/namespaces/{namespace}/trainingruntimes/{name}"


def read_job_leniently(document: Document) -> Job:
    """Return the job of a document. If its pods are invalid, return it without pods, because it may be held too."""
    try:
        return jobs.read_job(document)
    except SpecError:
        return jobs.read_without_pods(document)


def encode_relevant_fields(document: Document) -> bytes:
    """Return the JSON of all fields of a job that can change the status of its TrainingJob."""
    metadata, status = document["metadata"], document.get("status") or {}
    others = {
        key: value
        for key, value in (metadata.get("annotations") or {}).items()
        if key not in (*ADVICE_KEYS, jobs.READING)
    }
    states = [(item.get("type"), item.get("status")) for item in status.get("conditions") or ()]
    steps = reports.list_step_metrics(status)
    return encode_canonical([metadata.get("uid"), others, metadata.get("labels"), document.get("spec"), states, steps])


def _hash_request(document: Document, advice_request: AdviceRequest) -> int:
    """Return a hash of a job and its request for advice, which is used as a generation number."""
    asked = encode_canonical([advice_request.mode, advice_request.question.get("spec")])
    everything = asked + encode_relevant_fields(document)
    return int.from_bytes(hashlib.sha256(everything).digest()[:8])


def _read_shown_annotations(document: Document) -> dict[str, str]:
    """Return the annotations of Tilecast on a job."""
    return select_operator_annotations(document["metadata"].get("annotations") or {})


def _make_advised_annotations(outcome: AdviceOutcome) -> dict[str, str]:
    """Return the annotations that show an advice outcome. A declined request has none."""
    return {} if isinstance(outcome, AdviceRefusal) else make_advice_annotations(outcome)
