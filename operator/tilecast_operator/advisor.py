"""Find the advice for a job, or the reason why there is none. Equal requests are read and searched once.

Reading and searching run in threads, so that the event loop is not blocked. Work that waits for a thread needs a permit
(`FairLimiter`).
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from tilecast import kernels, zoo
from tilecast.advice import Advice, Request, inputs_hash
from tilecast.advice.incumbent import Incumbent, keep_incumbent
from tilecast.advice.measured import RunForecast, forecast_run
from tilecast.api import training_job
from tilecast.api.calibration import ObservedRun
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.nodes import NodesReport
from tilecast.spec import PartialPlan, Plan, SpecError, Workload
from tilecast_operator.interruptions import InterruptedSearches
from tilecast_operator.kube.client import Api, ApiError
from tilecast_operator.kube.fair_limiter import FairLimiter, PermitRequest
from tilecast_operator.kube.journal import Journal
from tilecast_operator.kube.kinds import Document
from tilecast_operator.objects.view import encode_canonical
from tilecast_operator.observed.earlier_runs import (
    EarlierRuns,
    describe_pools,
    digest_alternatives,
    list_possible_workloads,
)
from tilecast_operator.outcome import (
    AdviceOutcome,
    AdviceRefusal,
    decline_failed,
    decline_invalid,
    decline_without_pools,
    find_interruption,
    is_internal_error,
)
from tilecast_operator.result_cache import ResultCache
from tilecast_operator.search_inputs import PoolVersions, SearchInputs
from tilecast_operator.search_process import SearchInterruptedError
from tilecast_operator.searches import SearchRunner

ResultT = TypeVar("ResultT")
FindRuns: TypeAlias = Callable[[Collection[str]], Sequence[ObservedRun]]
ReadRequest: TypeAlias = Callable[[str, training_job.TrainingJobSpec, bytes | None], Request]

log = logging.getLogger("tilecast")

READERS = 2
"""Number of jobs that are read at once. With two, a slow one does not delay all others."""

UNPRICED: Any = {"mode": True, "observation_query": True, "training": {"checkpoint_seconds", "restart_seconds"}}
"""Fields of a spec that affect no advice."""


class Advisor:
    """Advisor on the current pools. Belongs to one event loop.

    Args:
        reader: Client that reads ConfigMaps.
        searches: Runner of searches.
        on_search: Function to call with each advice and the seconds of its search.
        threads: Number of threads for reading and pricing, besides the searches.
        size: Number of cached results of each kind.
        interruptions: Interrupted searches.
        journal: Journal in which an object is noted while a thread reads it.
        read: Function that makes a request from a spec and the content of its ConfigMap.
    """

    def __init__(
        self,
        reader: Api,
        searches: SearchRunner,
        on_search: Callable[[Advice, float], None],
        threads: int,
        size: int,
        interruptions: InterruptedSearches | None = None,
        journal: Journal | None = None,
        read: ReadRequest = training_job.to_request,
    ) -> None:
        self.problem: str | None = "the utilization model is not loaded yet"
        """Why no advice can be given, or None."""
        self._reader = reader
        self._searches = searches
        self._interruptions = interruptions or InterruptedSearches()
        self._journal = journal or Journal("", ())
        self._request_of = read
        self._on_search = on_search
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="advise")
        self._turns, self._readers = FairLimiter(threads), FairLimiter(READERS)
        self._report: NodesReport | None = None
        self._of_namespace: Mapping[str, NodesReport] = {}
        self._version = itertools.count(1)
        self.versions = PoolVersions({})
        self.facts = ""
        """Text that identifies the pools, without the corrections learned from runs."""
        self._requests: ResultCache[Request | AdviceRefusal] = ResultCache(size)
        self._answers: ResultCache[AdviceOutcome] = ResultCache(size, (Pool, Request))
        self._standing: ResultCache[AdviceOutcome] = ResultCache(size, (Pool, Request))
        self._hashes: ResultCache[str] = ResultCache(size)
        self._workloads: ResultCache[Mapping[str, Workload]] = ResultCache(size)
        self._own: ResultCache[EarlierRuns] = ResultCache(size)

    def set_pools(self, report: NodesReport, of_namespace: Mapping[str, NodesReport] = MappingProxyType({})) -> None:
        """Replace the pools.

        `of_namespace` maps each namespace with measured runs to the pools as these runs correct them.
        """
        numbers = {}
        for name, one in {"": report, **of_namespace}.items():
            known = self._of_namespace.get(name, self._report)
            is_same = known is not None and known.pools == one.pools
            numbers[name] = self.versions.get_version(name) if is_same else next(self._version)
        self.versions, self.facts = PoolVersions(numbers), describe_pools(report.pools)
        self._report, self._of_namespace = report, of_namespace

    def find_namespaces_over_budget(self) -> Mapping[str, float]:
        """Return the namespaces over their budget of search time, each with the seconds it used in the last minute."""
        return self._searches.turns.find_namespaces_over_budget()

    def find_namespaces_behind_others(self) -> Mapping[str, float]:
        """Return the namespaces whose searches wait behind those of others, with the seconds used in the last minute.

        These namespaces are over their budget of search time. If no other namespace has searched lately, none waits.
        """
        return self._searches.turns.find_namespaces_behind_others()

    async def run_in_thread(self, function: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Call a function in a thread at once, without waiting for a permit, and return its result."""
        call = partial(contextvars.copy_context().run, self._journal.call_recorded, function)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *arguments)

    async def warm_up(self) -> None:
        """Run a search for a small job, which loads the utilization model. If that has succeeded before, do nothing.

        Raises:
            SpecError: the model cannot be read, is not the expected one, or the search exceeded its limits.
        """
        if self.problem is None:
            return
        try:
            await self._searches.run_search(*_make_warm_up_job())
        except SearchInterruptedError as error:
            self.problem = f"a search of one small job {error}"
            raise SpecError("TILECAST_SEARCH_PROCESSES", self.problem, "raise the limits of a search") from None
        except SpecError as error:
            self.problem = str(error)
            raise
        self.problem = None

    def stop(self) -> None:
        """Stop the threads and the searches. A thread ends after its current work."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._searches.stop()

    async def read_search_inputs(self, namespace: str, document: Document, *, is_held: bool = False) -> SearchInputs:
        """Read the search inputs of a TrainingJob document and its ConfigMap.

        Args:
            namespace: Namespace of the job.
            document: The document.
            is_held: Whether a job is held until the advice is known.

        Raises:
            ApiError, OSError: The job's ConfigMap cannot be read now.
        """
        try:
            spec = training_job.parse_training_job(document)
        except SpecError as error:
            return SearchInputs(b"", AdviceRefusal("InvalidSpec", str(error)))
        stored: bytes | None = None
        reference = training_job.find_model_reference(spec)
        if reference is not None:
            config_map = await self._get_config_map(namespace, reference)
            try:
                if isinstance(config_map, AdviceRefusal):
                    return SearchInputs(b"", config_map, True)
                stored = training_job.config_map_content(reference, config_map)
            except SpecError as error:
                return SearchInputs(b"", AdviceRefusal("ModelNotFound", str(error)), True)
        everything = encode_canonical(spec.model_dump(exclude=UNPRICED)) + hashlib.sha256(stored or b"").digest()
        key = hashlib.sha256(everything).digest()
        with self._readers.add_request(key, PermitRequest(namespace, is_held)):
            request = await self._requests.get(key, lambda: self._read_request(key, spec, stored))
        return SearchInputs(key, request, reference is not None, namespace, is_held)

    async def add_runs(
        self, search_inputs: SearchInputs, find_runs: FindRuns, skip_digest: str | None = None
    ) -> SearchInputs:
        """Return the search inputs with earlier runs of the job.

        Args:
            search_inputs: The search inputs without runs.
            find_runs: Function that returns the runs of workloads, given by their digests, newest first.
            skip_digest: Digest of runs for which no forecasts are needed.
        """
        pools, request = self.list_pools(search_inputs), search_inputs.request
        if isinstance(request, AdviceRefusal) or not pools:
            return search_inputs
        gpus = tuple(pool.gpu.name for pool in pools)
        meant = await self._compute_once(
            search_inputs, self._workloads, (search_inputs.key, gpus), list_possible_workloads, request, pools
        )
        runs = find_runs(meant.keys())
        digest = digest_alternatives(search_inputs.key, self.facts, runs)
        if not runs or digest == skip_digest:
            return replace(search_inputs, runs_hash=digest if runs else "")
        key = (self._make_advice_key(search_inputs), tuple(runs))
        own = await self._compute_once(
            search_inputs, self._own, key, EarlierRuns.from_runs, request, pools, meant, runs
        )
        return replace(search_inputs, own=own, runs_hash=digest if own.own.runs else "")

    async def hash_inputs(self, search_inputs: SearchInputs) -> str | None:
        """Return a digest of everything that the advice depends on. Return None if there can be no advice.

        The digest is computed without a search.
        """
        pools, request = self.list_pools(search_inputs), search_inputs.request
        if not pools or isinstance(request, AdviceRefusal):
            return None
        _, digest = kernels.describe_model_file()
        return await self._compute_once(
            search_inputs, self._hashes, self._make_advice_key(search_inputs), inputs_hash, request, pools, digest
        )

    async def find_advice(self, search_inputs: SearchInputs) -> AdviceOutcome:
        """Return the advice for these inputs, or the reason why there is none."""
        if isinstance(search_inputs.request, AdviceRefusal):
            if is_internal_error(search_inputs.request):
                self._requests.drop(search_inputs.key)
            return search_inputs.request
        pools = self.list_pools(search_inputs)
        if not pools:
            return decline_without_pools(self._of_namespace.get(search_inputs.namespace, self._report))
        return await self.search(
            self._make_advice_key(search_inputs),
            search_inputs.key,
            search_inputs.request,
            pools,
            search_inputs.permit_request,
        )

    async def search(
        self,
        key: Hashable,
        search_key: Hashable,
        request: Request,
        pools: Sequence[Pool],
        permit_request: PermitRequest,
    ) -> AdviceOutcome:
        """Return the advice outcome of a request on some pools. Concurrent calls with equal keys share one search.

        Args:
            key: Key under which the outcome is cached.
            search_key: Key of the request without the pools, under which an interrupted search is remembered.
            request: The request.
            pools: The pools to search.
            permit_request: Request for a permit to search.
        """
        if (refusal := self._interruptions.find_refusal(search_key)) is not None:
            return refusal
        with self._searches.turns.add_request(key, permit_request):
            advice = await self._answers.get(key, lambda: self._search_plans(key, search_key, request, pools))
        if is_internal_error(advice) or find_interruption(advice):
            self._answers.drop(key)
        return advice

    async def keep_incumbent(
        self, search_inputs: SearchInputs, outcome: AdviceOutcome, incumbent: Incumbent | None
    ) -> AdviceOutcome:
        """Return the advice outcome with the current recommendation first, unless that is invalid or clearly worse."""
        pools = self.list_pools(search_inputs)
        if isinstance(outcome, AdviceRefusal) or incumbent is None or not pools:
            return outcome
        key = (self._make_advice_key(search_inputs), outcome.inputs_hash, incumbent)
        return await self._compute_once(
            search_inputs, self._standing, key, _put_incumbent_first, outcome, pools, incumbent
        )

    async def forecast_running(
        self, search_inputs: SearchInputs, pool: Pool, gpus: int, plan: Plan | PartialPlan | None, **chosen: Any
    ) -> RunForecast:
        """Return the forecast for a running plan on a pool.

        Raises:
            SpecError: The job cannot be read, or cannot run with such a plan.
        """
        if isinstance(search_inputs.request, AdviceRefusal):
            raise SpecError("spec", search_inputs.request.message, "correct the job")
        async with self._turns.acquire(None, search_inputs.permit_request):
            return await self.run_in_thread(partial(forecast_run, search_inputs.request, pool, gpus, plan, **chosen))

    def list_pools(self, search_inputs: SearchInputs) -> Sequence[Pool]:
        """Return the pools, corrected for the job's namespace and by its earlier runs."""
        report = self._of_namespace.get(search_inputs.namespace, self._report)
        return () if report is None else search_inputs.own.correct_pools(report.pools)

    def _make_advice_key(self, search_inputs: SearchInputs) -> Hashable:
        """Return the cache key of an advice outcome, made from the request, the pools and the measured runs."""
        return search_inputs.key, self.versions.get_version(search_inputs.namespace), search_inputs.own.own

    async def _compute_once(
        self,
        search_inputs: SearchInputs,
        memo: ResultCache[ResultT],
        key: Hashable,
        function: Callable[..., ResultT],
        *arguments: object,
    ) -> ResultT:
        """Return the result of a function, which runs in a thread and only once for equal keys."""
        place = (memo, key)

        async def compute() -> ResultT:
            async with self._turns.acquire(place):
                return await self.run_in_thread(function, *arguments)

        with self._turns.add_request(place, search_inputs.permit_request):
            return await memo.get(key, compute)

    async def _get_config_map(
        self, namespace: str, reference: training_job.ModelReference
    ) -> Mapping[str, Any] | AdviceRefusal | None:
        """Return the ConfigMap that a reference names, or the refusal if it cannot be read.

        Return None if the ConfigMap does not exist.
        """
        try:
            return await self._reader.get(f"/api/v1/namespaces/{namespace}/configmaps/{reference.name}")
        except ApiError as error:
            if error.status == 404:
                return None
            if error.status != 403:
                raise
            text = f"{reference.field}: the operator may not read ConfigMap {reference.name}; install the chart"
            return AdviceRefusal("ModelNotReadable", f"{text} with rbac.readConfigMaps, or {reference.otherwise}")

    async def _read_request(
        self, key: bytes, spec: training_job.TrainingJobSpec, stored: bytes | None
    ) -> Request | AdviceRefusal:
        async with self._readers.acquire(key):
            # A stored graph takes a while to read: it is read beside searches, not behind them.
            return await _refuse_on_error(
                asyncio.to_thread(self._journal.call_recorded, self._request_of, "", spec, stored)
            )

    async def _search_plans(
        self, key: Hashable, search_key: Hashable, request: Request, pools: Sequence[Pool]
    ) -> AdviceOutcome:
        try:
            answer = await _refuse_on_error(self._searches.run_search(request, pools, self._on_search, key))
        except SearchInterruptedError as error:
            return self._interruptions.add_interruption(search_key, error)
        if isinstance(answer, Advice):
            self._interruptions.forget_search(search_key)
        return answer


async def _refuse_on_error(work: Awaitable[ResultT]) -> ResultT | AdviceRefusal:
    """Return the result of `work`, or a refusal that gives its error. Errors of interrupted searches are raised."""
    try:
        return await work
    except SearchInterruptedError:
        raise
    except SpecError as error:
        return decline_invalid(error)
    except Exception as error:
        log.exception("advice failed")
        return decline_failed(error)


def _put_incumbent_first(outcome: Advice, pools: Sequence[Pool], incumbent: Incumbent) -> AdviceOutcome:
    """Return the advice outcome with the incumbent first. If the incumbent has no price, return it unchanged."""
    try:
        return keep_incumbent(outcome, pools, incumbent)
    except Exception:
        log.exception("what was recommended cannot be priced anew")
        return outcome


def _make_warm_up_job() -> tuple[Request, list[Pool]]:
    workload = Workload(model=zoo.find_preset("gpt2"), sequence_length=128, global_batch=1, precision="fp16")
    gpu = find_gpu("t4")
    return Request("warm-up", workload), [Pool("t4", gpu, 1, 1, find_link(gpu.intra_link), find_link("ethernet-10"))]
