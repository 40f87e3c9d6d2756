"""From what a job asks to the answer. Equal questions are read once and searched once.

Reading and searching run in threads of their own, few of them, so that watching and probes go on.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from tilecast import kernels, models
from tilecast.advise import Advice, Request, inputs_hash
from tilecast.advise.incumbent import Incumbent, hold
from tilecast.advise.ran import Ran, ran
from tilecast.api import training_job as trainingjob
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.nodes import NodesReport
from tilecast.render import document
from tilecast.spec import Plan, SpecError, Stated, Workload
from tilecast_operator.api import ApiError
from tilecast_operator.report.metrics import Metrics
from tilecast_operator.report.status import Refusal, Verdict
from tilecast_operator.view import Document, canonical

Advise: TypeAlias = Callable[[Request, Sequence[Pool]], Advice]
ResultT = TypeVar("ResultT")

log = logging.getLogger("tilecast")

INTERNAL_ERROR = "InternalError"


class Reader(Protocol):
    """What is needed of an API client."""

    def get(self, path: str) -> Awaitable[dict[str, Any]]:
        """Read an object."""


class Once(Generic[ResultT]):
    """Results by key, each computed once even when many ask at the same time; the least recently used go first, and a
    failure is not kept."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._found: OrderedDict[Hashable, asyncio.Future[ResultT]] = OrderedDict()

    async def get(self, key: Hashable, compute: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """The result of a key."""
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = asyncio.ensure_future(compute())
            while len(self._found) > self._size:
                self._found.popitem(last=False)
        self._found.move_to_end(key)
        try:
            return await asyncio.shield(found)
        except Exception:
            if self._found.get(key) is found:
                del self._found[key]
            raise

    def drop(self, key: Hashable) -> None:
        """Forget one result."""
        self._found.pop(key, None)

    def clear(self) -> None:
        """Forget every result."""
        self._found.clear()


@dataclass(frozen=True, slots=True)
class Question:
    """What a job asks: everything that decides its advice but the pools, or why that cannot be said."""

    key: bytes
    request: Request | Refusal
    has_config_map: bool = False
    """Whether part of it is in a ConfigMap, which is not watched."""


class Verdicts:
    """Answers questions for the pools there are. Belongs to one event loop."""

    def __init__(self, reader: Reader, advisor: Advise, metrics: Metrics, threads: int, kept: int) -> None:
        self._reader = reader
        self._advisor = advisor
        self._metrics = metrics
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="advise")
        self._report: NodesReport | None = None
        self._requests: Once[Request | Refusal] = Once(kept)
        self._advice: Once[Verdict] = Once(kept)
        self._held: Once[Verdict] = Once(kept)
        self._hashes: Once[str] = Once(kept)

    def use(self, report: NodesReport) -> None:
        """Answer for these pools from now on."""
        if self._report is None or self._report.pools != report.pools or not report.pools:
            self._advice.clear()
            self._held.clear()
            self._hashes.clear()
        self._report = report

    async def run(self, function: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Call a function in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    async def warm_up(self) -> None:
        """Load the utilization model by pricing one small job.

        Raises:
            SpecError: the model cannot be read, or is another than it should be.
        """
        await self.run(self._advisor, *_small_job())

    def stop(self) -> None:
        """End the threads once they are done with what they do."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def question(self, namespace: str, asked: Document) -> Question:
        """What a job asks.

        Raises:
            ApiError, OSError: its ConfigMap cannot be read now.
        """
        try:
            spec = trainingjob.parse(asked)
        except SpecError as error:
            return Question(b"", Refusal("InvalidSpec", str(error)))
        stored: bytes | None = None
        reference = trainingjob.reference(spec)
        if reference is not None:
            found = await self._config_map(namespace, reference)
            try:
                if isinstance(found, Refusal):
                    return Question(b"", found, True)
                stored = trainingjob.content(reference, found)
            except SpecError as error:
                return Question(b"", Refusal("ModelNotFound", str(error)), True)
        everything = (
            canonical(spec.model_dump(exclude={"mode", "observation_query"})) + hashlib.sha256(stored or b"").digest()
        )
        key = hashlib.sha256(everything).digest()
        return Question(key, await self._requests.get(key, lambda: self._read(spec, stored)), reference is not None)

    async def inputs_hash(self, question: Question) -> str | None:
        """Digest of all that would decide the advice now, without searching for it; None where there is none."""
        report, request = self._report, question.request
        if report is None or not report.pools or isinstance(request, Refusal):
            return None
        _, digest = kernels.model_info()
        return await self._hashes.get(question.key, lambda: self.run(inputs_hash, request, report.pools, digest))

    async def verdict(self, question: Question) -> Verdict:
        """The answer to a question."""
        if isinstance(question.request, Refusal):
            if is_passing(question.request):
                self._requests.drop(question.key)
            return question.request
        request = question.request
        found = await self._advice.get(question.key, lambda: self._search(request))
        if is_passing(found):
            self._advice.drop(question.key)
        return found

    async def held(self, question: Question, verdict: Verdict, before: Mapping[str, Any]) -> Verdict:
        """The answer to a job to which `before` was recommended for the same question."""
        report, standing = self._report, document.incumbent(before)
        if isinstance(verdict, Refusal) or standing is None or report is None:
            return verdict
        key = (question.key, verdict.inputs_hash, standing)
        return await self._held.get(key, lambda: self._hold(verdict, report, standing))

    async def ran(self, question: Question, pool: Pool, gpus: int, plan: Plan | Stated | None, **kept: Any) -> Ran:
        """The forecast for a plan that runs, on a pool as it is now.

        Raises:
            SpecError: no plan can be so.
        """
        if isinstance(question.request, Refusal):
            raise SpecError("spec", question.request.message, "correct the job")
        return await self.run(partial(ran, question.request, pool, gpus, plan, **kept))

    async def _hold(self, verdict: Advice, report: NodesReport, standing: Incumbent) -> Verdict:
        try:
            return await self.run(hold, verdict, report.pools, standing)
        except Exception:
            log.exception("what was recommended cannot be priced anew")
            return verdict

    async def _config_map(self, namespace: str, reference: trainingjob.Reference) -> Mapping[str, Any] | Refusal | None:
        """The ConfigMap, None where there is none, or why it cannot be read."""
        try:
            return await self._reader.get(f"/api/v1/namespaces/{namespace}/configmaps/{reference.name}")
        except ApiError as error:
            if error.status == 404:
                return None
            if error.status != 403:
                raise
            text = f"{reference.field}: the operator may not read ConfigMap {reference.name}; install the chart"
            return Refusal("ModelNotReadable", f"{text} with rbac.readConfigMaps, or {reference.otherwise}")

    async def _read(self, spec: trainingjob.TrainingJobSpec, stored: bytes | None) -> Request | Refusal:
        try:
            # A stored graph takes a while to read, beside searches rather than behind them.
            return await asyncio.to_thread(trainingjob.request, "", spec, stored)
        except SpecError as error:
            return Refusal("InvalidSpec", str(error))
        except Exception as error:
            log.exception("a job cannot be read")
            return _internal(error)

    async def _search(self, request: Request) -> Verdict:
        report = self._report
        if report is None or not report.pools:
            return Refusal("NoPools", _why_no_pools(report))
        began = time.monotonic()
        try:
            advice = await self.run(self._advisor, request, report.pools)
        except SpecError as error:
            return Refusal("InvalidSpec", str(error))
        except Exception as error:
            log.exception("advice failed")
            return _internal(error)
        self._metrics.count_search(advice, time.monotonic() - began)
        return advice


def is_passing(verdict: Verdict) -> bool:
    """Whether a verdict is a failure of this process, which another try may not have."""
    return isinstance(verdict, Refusal) and verdict.reason == INTERNAL_ERROR


def _internal(error: Exception) -> Refusal:
    return Refusal(INTERNAL_ERROR, f"advice failed with {type(error).__name__}; the operator's log has the rest")


def _why_no_pools(report: NodesReport | None) -> str:
    try:
        pools = report.require() if report is not None else ()
    except SpecError as error:
        return str(error)
    return f"{len(pools)} pools"


def _small_job() -> tuple[Request, list[Pool]]:
    workload = Workload(model=models.preset("gpt2"), sequence_length=128, global_batch=1, precision="fp16")
    gpu = find_gpu("t4")
    return Request("warm-up", workload), [Pool("t4", gpu, 1, 1, find_link(gpu.intra_link), find_link("ethernet-10"))]
