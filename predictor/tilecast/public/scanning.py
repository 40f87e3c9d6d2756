"""Forecast every GPU job of a cluster or folder as it is, and find a cheaper pool and plan of at least its speed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tilecast.advice import Advice, Baseline, Offer, Rejection, Request, advise
from tilecast.api.fields import value_at_path
from tilecast.hardware import Pool
from tilecast.inputs import job as job_inputs
from tilecast.inputs import launches, manifest
from tilecast.inputs import pools as pool_inputs
from tilecast.inputs.job import JobInput
from tilecast.inputs.job_options import JobOptions
from tilecast.inputs.pools import PoolOptions
from tilecast.inputs.reading import get_metadata_name
from tilecast.inputs.scan import ScannedJob
from tilecast.inputs.tracking import Track, iterate_without_progress
from tilecast.jobs import Pods
from tilecast.jobs.candidates import find_selected_pools
from tilecast.jobs.interface import read_pod_template
from tilecast.manifests.pods import find_pods
from tilecast.nodes import PublishedDevice
from tilecast.spec import PartialPlan, SpecError

Outcome = Literal["better", "good", "doesNotRun", "notRead"]
"""Whether a job would be cheaper elsewhere, is good as it is, does not run as it is, or could not be read."""
LEAST_SAVING = 0.05
"""Least saving, as a share of the price, that counts as better. Without prices, a share of the GPU-hours."""
OWN_DIMENSIONS = "own dimensions"
"""Model name shown for a job whose command or annotations give dimensions but no name."""
_HOURS = 24
_MAX_REASON = 200


@dataclass(frozen=True, slots=True)
class ScanRow:
    """One scanned job: its forecast as it is, and a better pool and plan if there is one."""

    namespace: str
    name: str
    kind: str
    outcome: Outcome
    model: str = ""
    batch: int | None = None
    precision: str = ""
    pool: str = ""
    gpus: int | None = None
    is_pool_assumed: bool = False
    """Whether the pods may run on several pools. If so, the forecast is for the first pool that is large enough."""
    plan: str = ""
    step_s: float | None = None
    better_pool: str = ""
    better_gpus: int | None = None
    better_plan: str = ""
    better_step_s: float | None = None
    gpu_hours_saved: float = 0.0
    """GPU-hours saved on one day's work."""
    money_saved: float | None = None
    """Money saved on one day's work. None without prices."""
    currency: str = ""
    total_gpu_hours_saved: float | None = None
    """GPU-hours saved over the whole run. None if its number of steps is unknown."""
    total_money_saved: float | None = None
    confidence: str = ""
    """Origin of the job's settings: stated by annotations, or read from its command with high or medium confidence."""
    reason: str = ""
    is_better_tight: bool = False
    """Whether the better plan may not fit, because the upper end of its memory range exceeds the GPU's memory."""
    """Why the job could not be read or cannot run."""


@dataclass(frozen=True, slots=True)
class Scan:
    """Result of a scan: a row for each job, with the largest saving first, and the number of searches that were run."""

    rows: tuple[ScanRow, ...]
    searches: int

    @property
    def needs_attention(self) -> bool:
        """Whether any job would be cheaper elsewhere or cannot run as it is."""
        return any(row.outcome in ("better", "doesNotRun") for row in self.rows)

    @property
    def has_unread(self) -> bool:
        """Whether any job could not be read."""
        return any(row.outcome == "notRead" for row in self.rows)


@dataclass(slots=True)
class JobScanner:
    """A scanner that prices jobs on a set of pools. Equal jobs are read and priced once."""

    pools: Sequence[Pool]
    labels: Sequence[Mapping[str, str]] = ()
    """Labels of every node with GPUs."""
    devices: Mapping[str, Sequence[PublishedDevice]] | None = None
    least_saving: float = LEAST_SAVING
    lenient: bool = False
    searches: int = 0
    _rows: dict[str, ScanRow] = field(default_factory=dict)
    """Cached rows, by the text from `_make_price_key`."""
    _priced: dict[str, tuple[Offer | None, Offer | None, str]] = field(default_factory=dict)
    """Cached results of `_price`, by request and pools."""

    @classmethod
    def from_options(
        cls, options: PoolOptions, least_saving: float = LEAST_SAVING, *, lenient: bool = False
    ) -> JobScanner:
        """Return a scanner for the pools that the options describe.

        Raises:
            SpecError: the pools cannot be read.
        """
        pools = pool_inputs.read_pools(options)
        labels, devices = pool_inputs.read_node_labels(options), pool_inputs.read_devices(options)
        return cls(pools, labels, devices, least_saving, lenient)

    def scan(self, jobs: Sequence[ScannedJob], track: Track = iterate_without_progress) -> Scan:
        """Return a row for each job, with the largest saving first.

        `track` wraps the loop over jobs, to show progress.
        """
        rows = [self._scan_job(job) for job in track(jobs, "jobs")]
        order = {"better": 0, "doesNotRun": 1, "good": 2, "notRead": 3}
        rows.sort(
            key=lambda row: (
                order[row.outcome],
                -(row.money_saved or 0.0),
                -row.gpu_hours_saved,
                row.namespace,
                row.name,
            )
        )
        return Scan(tuple(rows), self.searches)

    def _scan_job(self, job: ScannedJob) -> ScanRow:
        key = _make_price_key(job)
        if key not in self._rows:
            try:
                self._rows[key] = self._price_job(job)
            except SpecError as error:
                self._rows[key] = ScanRow("", "", "", "notRead", reason=str(error))
            except ValueError as error:
                # Anyone who may create jobs writes manifests. One of them must not end the scan of all others.
                text = " ".join(str(error).split())[:_MAX_REASON]
                self._rows[key] = ScanRow("", "", "", "notRead", reason=f"cannot be read: {text}")
        kind = str(job.document.get("kind"))
        return replace(self._rows[key], namespace=job.namespace, name=job.name, kind=kind)

    def _price_job(self, job: ScannedJob) -> ScanRow:
        text = json.dumps(job.items)
        read = job_inputs.read_described_job(JobOptions(job.name, lenient=self.lenient), job.document, text, job.items)
        try:
            request, usable = read.request(), list(self.pools)
        except SpecError as error:
            raise read.name_flag_in_error(error) from None
        others = tuple[Rejection, ...]()
        if read.source is not None:
            request, choice = read.source.narrow_request(request, self.pools, self.labels, self.devices)
            usable, others = choice.pools, () if choice.usable else choice.rejections
        own = usable
        if request.baseline is None:
            own = find_selected_pools(_list_workers(job, read), usable, self.labels)
            if not own:
                raise _explain_no_pool(str(job.document.get("kind")), others)
        is_assumed = request.baseline is None and len(own) > 1
        if read.launch is not None:
            request = replace(request, baseline=launches.find_baseline(read.launch, own, request.baseline))
        baseline, workload = request.baseline, request.workload
        if baseline is None:
            problem = "its pods do not say on which GPUs it runs"
            raise SpecError(str(job.document.get("kind")), problem, "give nodes, or a node selector")
        now, better, reason = self._price(request, baseline, usable)
        row = ScanRow(
            "",
            "",
            "",
            "good",
            model=_name_model(read, workload.model.name),
            batch=workload.global_batch,
            precision=workload.precision,
            pool=baseline.pool,
            gpus=baseline.gpus,
            is_pool_assumed=is_assumed,
            plan=str(now.plan) if now else read.launch.plan_text() if read.launch else "",
            confidence="stated" if read.reading is None else read.reading.confidence,
        )
        return _compare_offers(row, now, better, reason, self.least_saving)

    def _price(
        self, request: Request, baseline: Baseline, pools: Sequence[Pool]
    ) -> tuple[Offer | None, Offer | None, str]:
        """Return the forecast of the job as it is, a better offer, and the reason why the job cannot run as it is.

        The better offer is the cheapest one that is at least as fast. If prices are unknown or the job cannot run as it
        is, it is the fastest one on at most as many GPUs.
        """
        own = replace(request, name="", baseline=None)
        key = repr((own, baseline, [(pool.name, pool.max_gpus) for pool in pools]))
        if key in self._priced:
            return self._priced[key]
        timed = replace(own, objective="time", deadline_s=None, budget=None, target_step_s=None, limits_at="forecast")
        fixed = replace(own.constraints, gpus=baseline.gpus, max_gpus=None, max_nodes=None, allowed_pools=())
        here = [pool for pool in pools if pool.name == baseline.pool]
        as_is = self._search(replace(timed, constraints=fixed, plan=baseline.plan or PartialPlan()), here)
        now = as_is.best
        reason = "" if now else "; ".join(item.message for item in as_is.rejections) or "no plan fits"
        has_prices = all(pool.price_per_gpu_hour is not None for pool in pools)
        has_prices = has_prices and len({pool.currency for pool in pools}) == 1
        limits = own.constraints
        if limits.gpus is None and (not has_prices or now is None):
            limits = replace(limits, max_gpus=min(baseline.gpus, limits.max_gpus or baseline.gpus))
        wanted = replace(timed, constraints=limits, plan=None, objective="cost" if has_prices and now else "time")
        if now is not None:
            wanted = replace(wanted, target_step_s=now.step_s)
        self._priced[key] = now, self._search(wanted, pools).best, reason
        return self._priced[key]

    def _search(self, request: Request, pools: Sequence[Pool]) -> Advice:
        self.searches += 1
        return advise(request, pools)


def _make_price_key(job: ScannedJob) -> str:
    """Return a text with all fields of a job, and of the objects that it refers to, that affect its price.

    Jobs with equal texts are priced once.
    """
    metadata = value_at_path(job.document, ("metadata",)) or {}
    annotations = manifest.read_annotations(job.document)
    own = {key: value for key, value in annotations.items() if key.startswith("tilecast.dev/")}
    parts = [job.document.get("apiVersion"), job.document.get("kind"), job.document.get("spec"), own]
    labels = metadata.get("labels") if isinstance(metadata, Mapping) else None
    beside = [[item.get("kind"), value_at_path(item, ("metadata", "name")), item.get("spec"), item.get("data")]
              for item in job.objects]  # fmt: skip
    return json.dumps([*parts, labels, beside], sort_keys=True, default=str)


def _list_workers(job: ScannedJob, read: JobInput) -> tuple[Pods, ...]:
    """Return the GPU pods of a job of any kind, even of a kind that advice does not place."""
    if read.source is not None:
        return read.source.job.workers
    groups = find_pods(job.document, None).groups
    return tuple(read_pod_template(item.name, item.path, item.count, item.spec) for item in groups if item.gpus)


def _explain_no_pool(kind: str, rejections: Sequence[Rejection]) -> SpecError:
    """Return the error for a job that cannot run on any of the pools as it is.

    Args:
        kind: kind of the job.
        rejections: why advice rejects each pool, if it rejects all of them.
    """
    for item in rejections:
        if item.code != "NotSelected":
            return SpecError(kind, f"{item.pool}: {item.message}", item.remedy)
    problem = "its selector names nodes that were not given"
    return SpecError(kind, problem, "give their pool too, or correct the selector")


def _name_model(read: JobInput, name: str) -> str:
    """Return the name of a job's model, or `OWN_DIMENSIONS` if the model has no name except that of the job."""
    preset = value_at_path(read.document, ("spec", "model", "preset"))
    is_named_by_job = preset is None and name == get_metadata_name(read.document)
    return OWN_DIMENSIONS if is_named_by_job else name


def _compare_offers(row: ScanRow, now: Offer | None, better: Offer | None, reason: str, least: float) -> ScanRow:
    """Return the row with the forecast of the job as it is, and with the better offer if that saves enough.

    `least` is the smallest share that a better offer must save.
    """
    if now is not None:
        row = replace(row, step_s=now.step_s)
    if better is None:
        return row if now else replace(row, outcome="doesNotRun", reason=reason)
    found = replace(
        row,
        better_pool=better.pool.name,
        better_gpus=better.gpus,
        better_plan=str(better.plan),
        better_step_s=better.step_s,
        is_better_tight=better.is_tight,
    )
    if now is None:
        return replace(found, outcome="doesNotRun", reason=reason)
    hours, then = now.gpus * _HOURS, better.gpus * _HOURS * better.step_s / now.step_s
    prices = now.pool.price_per_gpu_hour, better.pool.price_per_gpu_hour
    money = None if None in prices else hours * (prices[0] or 0.0) - then * (prices[1] or 0.0)
    spent = None if prices[0] is None else hours * prices[0]
    share = money / spent if money is not None and spent else 1 - then / hours
    if share < least:
        return row
    steps = now.workload.steps
    days = None if steps is None else steps * now.step_s / 86400
    return replace(
        found,
        outcome="better",
        gpu_hours_saved=hours - then,
        money_saved=money,
        currency=now.pool.currency if money is not None else "",
        total_gpu_hours_saved=None if days is None else (hours - then) * days,
        total_money_saved=None if days is None or money is None else money * days,
    )
