"""Read the jobs of a queue from documents: TrainingJobs, jobs of other kinds, and Kueue's quotas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from tilecast import jobs
from tilecast.advice import Request, advise
from tilecast.api import documents, training_job
from tilecast.api.documents import Document
from tilecast.api.fields import as_mapping, value_at_path
from tilecast.hardware import Pool
from tilecast.inputs.reading import metadata_name, read_text
from tilecast.jobs import Priorities, PriorityClass, kueue
from tilecast.jobs.candidates import find_candidates
from tilecast.jobs.candidates import request_with_baseline as narrowed
from tilecast.jobs.quantities import pod_gpus
from tilecast.nodes import PublishedDevice
from tilecast.planner.options import job_options
from tilecast.planner.problem import JobOption, QueuedJob, UnplannedJob, start_running
from tilecast.spec import SpecError

_KUEUE = ("LocalQueue", "ClusterQueue", "ResourceFlavor")


def read_documents(name: str) -> list[Document]:
    """Return all documents of a file, of standard input (`-`), or of the YAML and JSON files of a folder.

    Raises:
        SpecError: a file cannot be read, or there is no document.
    """
    path = Path(name)
    files = sorted(item for item in path.iterdir() if item.suffix in _ENDINGS) if path.is_dir() else [path]
    results = [item for file in files for item in documents.load_documents(read_text(str(file)), str(file))]
    if not results:
        raise SpecError(name, "holds no job", "give a file, a folder of YAML or JSON files, or - for standard input")
    return results


_ENDINGS = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class QueueDocuments:
    """Documents that describe a queue, grouped by their roles."""

    jobs: tuple[Document, ...]
    others: Mapping[tuple[str, str], Document]
    """All documents by kind and name, for runtimes of TrainJobs and for objects that ResourceClaims refer to."""
    config_maps: Mapping[str, Document]
    priorities: Priorities
    kueue: kueue.KueueObjects
    pods: tuple[Document, ...] = ()

    @classmethod
    def from_documents(cls, results: Sequence[Document]) -> QueueDocuments:
        """Group documents by kind; a job that a TrainingJob has as its target is planned as that TrainingJob only.

        Raises:
            SpecError: none of the documents is a job.
        """
        by_kind = dict[str, dict[str, Document]]()
        for item in results:
            by_kind.setdefault(str(item.get("kind")), {})[f"{_namespace(item)}/{metadata_name(item)}"] = item
        own = [item for item in results if item.get("kind") == training_job.KIND]
        targets = {_target_key(item) for item in own}
        others = [
            item
            for item in results
            if jobs.is_job(item) and (str(item.get("kind")), metadata_name(item)) not in targets
        ]
        if not (own or others):
            remedy = "give TrainingJobs or jobs of other kinds, for instance `kubectl get trainingjobs,jobs -A -o json`"
            raise SpecError("JOBS", f"holds {len(results)} documents and no job", remedy)
        local = {(_namespace(item), metadata_name(item)): item for item in by_kind.get("LocalQueue", {}).values()}
        cluster, flavors = (
            {metadata_name(item): item for item in by_kind.get(kind, {}).values()} for kind in _KUEUE[1:]
        )
        return cls(
            (*own, *others),
            {(str(item.get("kind")), metadata_name(item)): item for item in results},
            {metadata_name(item): item for item in by_kind.get("ConfigMap", {}).values()},
            Priorities(
                *(
                    {metadata_name(item): PriorityClass.from_object(item) for item in by_kind.get(kind, {}).values()}
                    for kind in ("WorkloadPriorityClass", "PriorityClass")
                )
            ),
            kueue.KueueObjects(local, cluster, flavors),
            tuple(by_kind.get("Pod", {}).values()),
        )

    def held(self, pool_of: Mapping[str, str]) -> Counter[str]:
        """Return the number of GPUs that pods hold in each pool.

        Args:
            pool_of: the pool of each node.
        """
        held = Counter[str]()
        for pod in self.pods:
            spec, status = (as_mapping(pod.get(part)) for part in ("spec", "status"))
            if status.get("phase") not in ("Succeeded", "Failed") and (pool := pool_of.get(str(spec.get("nodeName")))):
                held[pool] += pod_gpus(pod)
        return held


def _target_key(document: Document) -> tuple[str, str]:
    target = as_mapping(value_at_path(document, ("spec", "targetRef")))
    return (str(target.get("kind")), str(target.get("name"))) if target else ("", "")


def _namespace(document: Document) -> str:
    return str(value_at_path(document, ("metadata", "namespace")) or "")


@dataclass(frozen=True, slots=True)
class ReadQueue:
    """Jobs of a queue that could be read, reasons for the unreadable ones, and quotas."""

    jobs: tuple[QueuedJob, ...]
    unplanned: tuple[UnplannedJob, ...]
    quotas: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """GPUs by pool and ClusterQueue."""


@dataclass(frozen=True, slots=True)
class JobQueueReader:
    """Reader of jobs for a set of pools; equal jobs are priced once."""

    given: QueueDocuments
    pools: Sequence[Pool]
    labels: Sequence[Mapping[str, str]]
    """Labels of every node with GPUs."""
    now: datetime
    devices: Mapping[str, Sequence[PublishedDevice]] | None = None
    """Devices that ResourceSlices publish, by pool; None if no nodes are given."""
    _priced: dict[object, tuple[JobOption, ...]] = field(default_factory=dict)

    def read(self) -> ReadQueue:
        """Return all jobs of the queue that have not ended."""
        results, refused, quotas = list[QueuedJob](), list[UnplannedJob](), dict[str, dict[str, int]]()
        for document, name in zip(self.given.jobs, _unique_names(self.given.jobs), strict=True):
            try:
                job = self._job(document, name, quotas)
            except SpecError as error:
                refused.append(UnplannedJob(name, f"{error.field}: {error.problem}", error.remedy))
            else:
                results += [] if job is None else [job]
        return ReadQueue(tuple(results), tuple(refused), quotas)

    def _job(self, document: Document, name: str, quotas: dict[str, dict[str, int]]) -> QueuedJob | None:
        if document.get("kind") == training_job.KIND:
            request = training_job.read_request(document, self.given.config_maps)
            present = (request.baseline.pool, request.baseline.gpus) if request.baseline else None
            return self._queued(document, name, request, self.pools, present)
        runtime = self.given.others.get(jobs.runtime_of(document) or ("", ""))
        job = jobs.resolve_claims(jobs.read_job(document, runtime), self.given.others)
        if job.is_finished or job.is_owned:
            return None
        try:
            request = training_job.read_request(
                training_job.training_job_document(job.name, jobs.read_annotations(job)), self.given.config_maps
            )
        except SpecError as error:
            raise jobs.locate_in_annotations(error) from None
        has_quota = job.queue and self._has_queues and not job.has_claims
        queue = kueue.find_queue(self.given.kueue, job.namespace, job.queue) if has_quota else None
        possible = find_candidates(job, self.pools, self.labels, queue, self.devices, is_placed=not job.is_countable)
        request = narrowed(request, job, possible, is_placed=not job.is_countable)
        owner = queue.cluster_queue if queue else ""
        for item in possible.usable:
            if item.flavor is not None:
                quotas.setdefault(item.pool.name, {})[owner] = item.flavor.quota
        present = (possible.baseline.pool, possible.baseline.gpus) if possible.baseline else None
        results = self._queued(document, name, request, possible.pools, present, owner, job.pod_priority_class)
        is_running = bool(document.get("status")) and job.has_started and present is not None
        return self._running(document, results) if is_running else results

    @property
    def _has_queues(self) -> bool:
        return bool(self.given.kueue.cluster_queues)

    def _queued(
        self, document: Document, name: str, request: Request, pools: Sequence[Pool], present: tuple[str, int] | None,
        queue: str = "", pod_class: str = "",
    ) -> QueuedJob:  # fmt: skip
        metadata = as_mapping(document.get("metadata"))
        labels = as_mapping(metadata.get("labels"))
        arrival = self._since(metadata.get("creationTimestamp"))
        return QueuedJob(
            name=name,
            options=self._options(request, pools),
            arrival_s=arrival,
            weight=jobs.read_weight(as_mapping(metadata.get("annotations"))),
            priority=self.given.priorities.find_priority(str(labels.get(jobs.PRIORITY_CLASS, "")), pod_class),
            deadline_s=None if request.deadline_s is None else request.deadline_s + arrival,
            queue=queue,
            present=present,
        )

    def _options(self, request: Request, pools: Sequence[Pool]) -> tuple[JobOption, ...]:
        key = repr((replace(request, name="", baseline=None), [(pool.name, pool.max_gpus) for pool in pools]))
        if key not in self._priced:
            self._priced[key] = job_options(request, pools)
        if not self._priced[key]:
            refused = advise(request, pools).rejections
            problem = "; ".join(f"{item.pool}: {item.message}" for item in refused) or "no pool has a plan for it"
            raise SpecError("no pool can run it", problem, refused[0].remedy if refused else "see `tilecast advise`")
        return self._priced[key]

    def _since(self, time: object) -> float:
        """Return the seconds from now to a past time, which are negative; 0 if there is no such time."""
        try:
            at = datetime.fromisoformat(str(time))
        except ValueError:
            return 0.0
        return min((at - self.now).total_seconds(), 0.0) if at.tzinfo else 0.0

    def _running(self, document: Document, job: QueuedJob) -> QueuedJob:
        """Return a running job with its remaining work, by the forecast on its present pool."""
        return start_running(job, -self._since(value_at_path(document, ("status", "startTime"))))


def _unique_names(documents: Sequence[Document]) -> list[str]:
    """Return the shortest name for each document that is unique: name, namespace and name, or with its kind too."""
    ways = [[_job_name(item, way) for item in documents] for way in range(3)]
    counts = [Counter(names) for names in ways]
    return [
        next((names[place] for names, count in zip(ways, counts, strict=True) if count[names[place]] == 1), "")
        or f"{ways[-1][place]} ({place + 1})"
        for place in range(len(documents))
    ]


def _job_name(document: Document, detail: int) -> str:
    name = metadata_name(document) or "unnamed"
    placed = f"{_namespace(document) or 'default'}/{name}"
    return (name, placed, f"{document.get('kind')}/{placed}")[detail]
