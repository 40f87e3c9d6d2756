"""Measured steps held against the forecast of the pool and plan that ran, as it was when the job started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilecast.advise.ran import Ran
from tilecast.hardware import normalise
from tilecast.nodes import NodesReport
from tilecast.render import document
from tilecast.spec import SpecError, Stated
from tilecast_operator import observe
from tilecast_operator.learning import Learner, Score
from tilecast_operator.observe import Refused, Report
from tilecast_operator.report.metrics import Metrics
from tilecast_operator.verdicts import Verdicts
from tilecast_operator.view import Key, View

_Said = tuple[str | None, int | None, Stated | None]
"""What reports say of where they come from: pool, GPUs and plan."""


class Scores:
    """Forecasts and measured steps of the jobs that run, and what they teach. Belongs to one event loop."""

    def __init__(self, verdicts: Verdicts, metrics: Metrics, now: Callable[[], str]) -> None:
        self.learner = Learner()
        self._verdicts = verdicts
        self._metrics = metrics
        self._now = now
        self._scores: dict[Key, Score] = {}
        self._said: dict[Key, _Said] = {}
        self._refused: dict[Key, tuple[str, str]] = {}
        """Annotations that do not count, and why."""

    def __getitem__(self, key: Key) -> Score | None:
        return self._scores.get(key)

    def recall(self, key: Key, view: View) -> None:
        """Take note of what a job's status keeps, where more is kept there than here."""
        found, known = Score.of(view.status), self._scores.get(key)
        if found is not None and (known is None or known.window.samples < found.window.samples):
            self._scores[key] = found
            self.learner.take(view.uid, found)

    def forget(self, key: Key) -> None:
        """Let go of a job. Its run is kept."""
        for known in (self._scores, self._said, self._refused):
            known.pop(key, None)

    def withdraw(self, key: Key, view: View) -> None:
        """Let go of a step that an annotation told which is no longer there."""
        known = self._scores.get(key)
        if known is not None and known.window.latest.source == "annotation":
            self.forget(key)
            self.learner.drop(view.uid)

    def refusal(self, key: Key) -> str | None:
        """Why the annotation of a job does not count, if it does not."""
        return self._refused[key][1] if key in self._refused else None

    async def annotated(self, key: Key, view: View, report: NodesReport, text: str) -> bool:
        """Take what the annotation of a job says, once; returns whether it counts."""
        known = self._scores.get(key)
        is_taken = known is not None and known.window.latest.annotation == text[:32]
        if is_taken or self._refused.get(key, ("", ""))[0] == text:
            return False
        try:
            await self.take(key, view, report, observe.from_annotation(text))
        except Refused as refused:
            self._metrics.observations.labels("annotation", refused.outcome).inc()
            self._refused[key] = (text, str(refused))
            return False
        return True

    async def take(self, key: Key, view: View | None, report: NodesReport | None, told: Report) -> Score:
        """Hold a report against the forecast.

        Raises:
            Refused: it does not count, and why.
        """
        if view is None:
            raise Refused("unknown_job", 404, f"there is no TrainingJob {key.name} in namespace {key.namespace}")
        status = view.status
        best = status.get("recommendation")
        if not best or report is None:
            raise Refused("no_advice", 409, f"TrainingJob {key.name} has no forecast to hold a step against")
        known = self._scores.get(key)
        forecast = await self._forecast(
            key, view, report, told, best, known.forecast if known else status.get("forecast")
        )
        observe.plausible(told.seconds, forecast["rawSeconds"])
        known = self._scores.get(key)  # others may have reported while it was priced
        same = known is not None and _place(known.forecast) == _place(forecast)
        window = observe.added(known.window if known and same else None, told, self._now())
        score = self._scores[key] = Score(forecast, window)
        self._refused.pop(key, None)
        self.learner.take(view.uid, score)
        self._metrics.observations.labels(told.source, "accepted").inc()
        self._metrics.count_observation(score, told.seconds, told.steps, _baseline(status))
        return score

    async def _forecast(
        self,
        key: Key,
        view: View,
        report: NodesReport,
        told: Report,
        best: Mapping[str, Any],
        frozen: Mapping[str, Any] | None,
    ) -> Mapping[str, Any]:
        """The frozen forecast; a new one where the job turns out to run elsewhere or otherwise."""
        is_scored = frozen is not None and "rawSeconds" in frozen
        said = (_pool_of(told, report, best), told.gpus, told.plan)
        if is_scored and frozen is not None and (said == (None, None, None) or said == self._said.get(key)):
            return frozen
        standing = document.incumbent(best)
        name, gpus = said[0] or best["pool"], told.gpus or best["gpus"]
        pool = next((item for item in report.pools if item.name == name), None)
        if standing is None or pool is None:
            raise Refused("unknown_pool", 409, f"there is no pool {name} that the job could run on")
        is_recommended = name == best["pool"] and gpus == best["gpus"] and told.plan is None
        try:
            question = await self._verdicts.question(key.namespace, view.document)
            ran = await self._verdicts.ran(
                question,
                pool,
                gpus,
                standing.plan if is_recommended else told.plan,
                batch=standing.global_batch,
                precision=standing.precision,
            )
        except SpecError as error:
            raise Refused("no_advice", 409, f"what runs cannot be forecast: {error}") from None
        self._said[key] = said
        since = (frozen or {}).get("frozenAt") or self._now()
        found = _status(ran, since, ran.plan == standing.plan and name == best["pool"])
        return frozen if is_scored and frozen is not None and _place(frozen) == _place(found) else found


def _status(ran: Ran, since: str, followed: bool) -> dict[str, Any]:
    """`status.forecast`."""
    return {
        "frozenAt": since,
        "pool": ran.pool.name[:63],
        "gpus": ran.plan.gpus,
        "plan": str(ran.plan)[:128],
        "rawSeconds": _figures(ran.raw_s),
        "stepSeconds": {
            "target": _figures(ran.step_s),
            "lowerBound": _figures(ran.lower_s),
            "upperBound": _figures(ran.upper_s),
        },
        "group": [part[:63] for part in ran.group],
        "followed": followed,
    }


def _place(forecast: Mapping[str, Any]) -> tuple[object, ...]:
    return forecast.get("pool"), forecast.get("gpus"), forecast.get("plan")


def _pool_of(told: Report, report: NodesReport, best: Mapping[str, Any]) -> str | None:
    """The pool that a report comes from: that of its node, else the one that has its GPU; None where it does not say.

    Raises:
        Refused: no pool, or more than one, has its GPU.
    """
    if told.node is not None:
        of_node = next((item.pool.name for item in report.found if told.node in item.members), None)
        if of_node is not None:
            return of_node
    if told.gpu is None:
        return None
    pools = [pool for pool in report.pools if normalise(told.gpu) in pool.gpu.aliases]
    if any(pool.name == best["pool"] for pool in pools):
        return str(best["pool"])
    if len(pools) == 1:
        return pools[0].name
    several = f"{len(pools)} pools have" if pools else "no pool has"
    raise Refused("unknown_pool", 409, f"{several} a {told.gpu[:64]}; report from a pod whose token names its node")


def _baseline(status: Mapping[str, Any]) -> float | None:
    """GPU-seconds of a step of the job's baseline."""
    found = status.get("baseline") or {}
    step = (found.get("stepSeconds") or {}).get("target")
    return None if step is None else float(step) * int(found.get("gpus", 0))


def _figures(value: float) -> float:
    return float(f"{value:.6g}")
