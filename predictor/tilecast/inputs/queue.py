"""Read a queue from Kubernetes objects: TrainingJobs, other kinds of jobs, and Kueue's quotas."""

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
from tilecast.inputs.manifest import read_described_spec
from tilecast.inputs.reading import get_metadata_name, read_text
from tilecast.inputs.tracking import Track, iterate_without_progress
from tilecast.jobs import Priorities, PriorityClass, kueue
from tilecast.jobs.candidates import build_job_request as narrowed
from tilecast.jobs.candidates import find_candidates
from tilecast.jobs.quantities import count_pod_gpus
from tilecast.nodes import PublishedDevice
from tilecast.planner.options import list_job_options, scale_options, separate_length
from tilecast.planner.problem import JobOption, QueuedJob, UnplannedJob, mark_as_running
from tilecast.spec import SpecError

_KUEUE = ("LocalQueue", "ClusterQueue", "ResourceFlavor")


def read_documents(name: str, *, may_be_empty: bool = False) -> list[Document]:
    """Return all documents of a file, of standard input (`-`), or of all YAML and JSON files in a folder.

    Raises:
        SpecError: a file cannot be read, or there are no documents and `may_be_empty` is False.
    """
    path = Path(name)
    files = sorted(item for item in path.iterdir() if item.suffix in _ENDINGS) if path.is_dir() else [path]
    results = [item for file in files for item in documents.load_documents(read_text(str(file)), str(file))]
    if not results and not may_be_empty:
        raise SpecError(name, "holds no job", "give a file, a folder of YAML or JSON files, or - for standard input")
    return results


_ENDINGS = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class QueueDocuments:
    """Kubernetes objects that describe a queue, grouped by kind."""

    jobs: tuple[Document, ...]
    others: Mapping[tuple[str, str], Document]
    """All documents by kind and name, among them runtimes of TrainJobs and objects that ResourceClaims refer to."""
    config_maps: Mapping[str, Document]
    priorities: Priorities
    kueue: kueue.KueueObjects
    pods: tuple[Document, ...] = ()

    @classmethod
    def from_documents(cls, results: Sequence[Document]) -> QueueDocuments:
        """Return documents grouped by kind. Jobs that a TrainingJob targets are left out of `jobs`.

        Raises:
            SpecError: none of the documents is a job.
        """
        by_kind = dict[str, dict[str, Document]]()
        for item in results:
            by_kind.setdefault(str(item.get("kind")), {})[f"{_get_namespace(item)}/{get_metadata_name(item)}"] = item
        own = [item for item in results if item.get("kind") == training_job.KIND]
        targets = {_get_target_key(item) for item in own}
        others = [
            item
            for item in results
            if jobs.is_job(item) and (str(item.get("kind")), get_metadata_name(item)) not in targets
        ]
        if not (own or others):
            remedy = "give TrainingJobs or jobs of other kinds, for instance `kubectl get trainingjobs,jobs -A -o json`"
            raise SpecError("JOBS", f"holds {len(results)} documents and no job", remedy)
        local = {
            (_get_namespace(item), get_metadata_name(item)): item for item in by_kind.get("LocalQueue", {}).values()
        }
        cluster, flavors = (
            {get_metadata_name(item): item for item in by_kind.get(kind, {}).values()} for kind in _KUEUE[1:]
        )
        return cls(
            (*own, *others),
            {(str(item.get("kind")), get_metadata_name(item)): item for item in results},
            {get_metadata_name(item): item for item in by_kind.get("ConfigMap", {}).values()},
            Priorities(
                *(
                    {
                        get_metadata_name(item): PriorityClass.from_object(item)
                        for item in by_kind.get(kind, {}).values()
                    }
                    for kind in ("WorkloadPriorityClass", "PriorityClass")
                )
            ),
            kueue.KueueObjects(local, cluster, flavors),
            tuple(by_kind.get("Pod", {}).values()),
        )

    def split_off_added_job(self, added: Sequence[Document]) -> tuple[QueueDocuments, Document]:
        """Return a copy of the queue's documents without the one job that is also in `added`, and that job.

        Args:
            added: documents, of which exactly one is a job.

        Raises:
            SpecError: several of the documents are jobs, or none is a job.
        """
        new = [item for item in self.jobs if any(item is other for other in added)]
        if len(new) != 1:
            raise SpecError("--if-submitted", f"holds {len(new)} jobs", "give a file with one job")
        return replace(self, jobs=tuple(item for item in self.jobs if item is not new[0])), new[0]

    def count_held_gpus(self, pools_by_node: Mapping[str, str]) -> Counter[str]:
        """Return the number of GPUs in each pool that unfinished pods hold, by pool name.

        Args:
            pools_by_node: name of the pool for each node's name.
        """
        held = Counter[str]()
        for pod in self.pods:
            spec, status = (as_mapping(pod.get(part)) for part in ("spec", "status"))
            if status.get("phase") not in ("Succeeded", "Failed") and (
                pool := pools_by_node.get(str(spec.get("nodeName")))
            ):
                held[pool] += count_pod_gpus(pod)
        return held


def _get_target_key(document: Document) -> tuple[str, str]:
    target = as_mapping(value_at_path(document, ("spec", "targetRef")))
    return (str(target.get("kind")), str(target.get("name"))) if target else ("", "")


def _get_namespace(document: Document) -> str:
    return str(value_at_path(document, ("metadata", "namespace")) or "")


@dataclass(frozen=True, slots=True)
class ParsedQueue:
    """The jobs of a queue, the jobs that cannot be planned (with reasons), and quotas."""

    jobs: tuple[QueuedJob, ...]
    unplanned: tuple[UnplannedJob, ...]
    quotas: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """GPU quotas by pool and ClusterQueue."""


@dataclass(frozen=True, slots=True)
class JobQueueReader:
    """A reader that prices the jobs of a queue on a set of pools. Equal jobs are priced once."""

    documents: QueueDocuments
    pools: Sequence[Pool]
    labels: Sequence[Mapping[str, str]]
    """Labels of every node with GPUs."""
    now: datetime
    devices: Mapping[str, Sequence[PublishedDevice]] | None = None
    """Devices that ResourceSlices publish, by pool. None without nodes."""
    _priced: dict[object, tuple[JobOption, ...]] = field(default_factory=dict)

    def read(self, track: Track = iterate_without_progress) -> ParsedQueue:
        """Return the unfinished jobs of the queue. `track` wraps the loop over jobs, to show progress."""
        results, refused, quotas = list[QueuedJob](), list[UnplannedJob](), dict[str, dict[str, int]]()
        named = tuple(zip(self.documents.jobs, _make_unique_names(self.documents.jobs), strict=True))
        for document, name in track(named, "jobs"):
            try:
                job = self._read_document(document, name, quotas)
            except SpecError as error:
                refused.append(UnplannedJob(name, f"{error.field}: {error.problem}", error.remedy))
            else:
                results += [] if job is None else [job]
        return ParsedQueue(tuple(results), tuple(refused), quotas)

    def read_new_job(
        self, document: Document, taken: Sequence[str], quotas: dict[str, dict[str, int]]
    ) -> QueuedJob | UnplannedJob:
        """Return a job that is not submitted yet, as if it arrived now, or the reason why it cannot be planned.

        Args:
            document: the job.
            taken: names of the jobs in the queue.
            quotas: GPUs by pool and ClusterQueue. The quotas of the job's queue are added to it.
        """
        given = as_mapping(document.get("metadata"))
        metadata = {key: value for key, value in given.items() if key != "creationTimestamp"}
        fresh = {key: value for key, value in document.items() if key != "status"} | {"metadata": metadata}
        name = _format_job_name(document, 0)
        name = f"{name} (new)" if name in taken else name
        try:
            job = self._read_document(fresh, name, quotas)
        except SpecError as error:
            return UnplannedJob(name, f"{error.field}: {error.problem}", error.remedy)
        if job is None:
            return UnplannedJob(name, "it belongs to another job", "give the owner")
        return replace(job, arrival_s=0.0, present=None)

    def _read_document(self, document: Document, name: str, quotas: dict[str, dict[str, int]]) -> QueuedJob | None:
        if document.get("kind") == training_job.KIND:
            request = training_job.read_request(document, self.documents.config_maps)
            present = (request.baseline.pool, request.baseline.gpus) if request.baseline else None
            return self._build_queued_job(document, name, request, self.pools, present)
        runtime = self.documents.others.get(jobs.find_training_runtime(document) or ("", ""))
        job = jobs.resolve_claims(jobs.read_job(document, runtime), self.documents.others)
        if job.is_finished or job.is_owned:
            return None
        try:
            spec, _ = read_described_spec(document, job.annotations, self.documents.others)
            described = training_job.training_job_document(job.name, spec)
            request = training_job.read_request(described, self.documents.config_maps)
        except SpecError as error:
            raise jobs.move_error_to_annotation(error) from None
        has_quota = job.queue and self._has_queues and not job.has_claims
        queue = kueue.find_queue(self.documents.kueue, job.namespace, job.queue) if has_quota else None
        possible = find_candidates(
            job, self.pools, self.labels, queue, self.devices, writes_advice=not job.is_countable
        )
        request = narrowed(request, job, possible, writes_advice=not job.is_countable)
        owner = queue.cluster_queue if queue else ""
        for item in possible.usable:
            if item.flavor is not None:
                quotas.setdefault(item.pool.name, {})[owner] = item.flavor.quota
        present = (possible.baseline.pool, possible.baseline.gpus) if possible.baseline else None
        results = self._build_queued_job(
            document, name, request, possible.pools, present, owner, job.pod_priority_class
        )
        is_running = bool(document.get("status")) and job.has_started and present is not None
        return self._with_remaining_work(document, results) if is_running else results

    @property
    def _has_queues(self) -> bool:
        return bool(self.documents.kueue.cluster_queues)

    def _build_queued_job(
        self, document: Document, name: str, request: Request, pools: Sequence[Pool], present: tuple[str, int] | None,
        queue: str = "", pod_class: str = "",
    ) -> QueuedJob:  # fmt: skip
        metadata = as_mapping(document.get("metadata"))
        labels = as_mapping(metadata.get("labels"))
        arrival = self._seconds_until(metadata.get("creationTimestamp"))
        return QueuedJob(
            name=name,
            options=self._price_options(request, pools),
            arrival_s=arrival,
            weight=jobs.read_weight(as_mapping(metadata.get("annotations"))),
            priority=self.documents.priorities.find_priority(str(labels.get(jobs.PRIORITY_CLASS, "")), pod_class),
            deadline_s=None if request.deadline_s is None else request.deadline_s + arrival,
            queue=queue,
            present=present,
        )

    def _price_options(self, request: Request, pools: Sequence[Pool]) -> tuple[JobOption, ...]:
        one_step, steps = separate_length(request)
        key = one_step, tuple((pool.name, pool.max_gpus) for pool in pools)
        if key not in self._priced:
            self._priced[key] = list_job_options(one_step, pools)
        if not self._priced[key]:
            refused = advise(request, pools).rejections
            problem = "; ".join(f"{item.pool}: {item.message}" for item in refused) or "no pool has a plan for it"
            raise SpecError("no pool can run it", problem, refused[0].remedy if refused else "see `tilecast advise`")
        return scale_options(self._priced[key], steps)

    def _seconds_until(self, time: object) -> float:
        """Return the seconds from now to an ISO 8601 time in the past, as a negative number.

        Return 0 for a future or invalid time.
        """
        try:
            at = datetime.fromisoformat(str(time))
        except ValueError:
            return 0.0
        return min((at - self.now).total_seconds(), 0.0) if at.tzinfo else 0.0

    def _with_remaining_work(self, document: Document, job: QueuedJob) -> QueuedJob:
        """Return the job as running, with the run time of its options reduced to the work that remains.

        The remaining work follows from the time since its start and the forecast on its present pool.
        """
        return mark_as_running(job, -self._seconds_until(value_at_path(document, ("status", "startTime"))))


def _make_unique_names(documents: Sequence[Document]) -> list[str]:
    """Return a unique name for each document: the shortest of NAME, NAMESPACE/NAME and KIND/NAMESPACE/NAME."""
    ways = [[_format_job_name(item, way) for item in documents] for way in range(3)]
    counts = [Counter(names) for names in ways]
    return [
        next((names[place] for names, count in zip(ways, counts, strict=True) if count[names[place]] == 1), "")
        or f"{ways[-1][place]} ({place + 1})"
        for place in range(len(documents))
    ]


def _format_job_name(document: Document, detail: int) -> str:
    name = get_metadata_name(document) or "unnamed"
    placed = f"{_get_namespace(document) or 'default'}/{name}"
    return (name, placed, f"{document.get('kind')}/{placed}")[detail]
