"""Every alert of the chart, firing and quiet, over metrics that a running operator exported.

Each story runs an operator over a store, scrapes its metrics at certain moments, and states which alerts the rules
raise. Minutes pass between scrapes, but not in the test: `Tape.hold` says for how long the registry did not change.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from conftest import ensure_or_fail
from operator_store import JOBS, Store, job, node, on_first_pool, operator, settled
from test_observe import body, status, store_with, until
from tilecast.advice import Advice, Request, advise
from tilecast.hardware import Pool
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.kube.client import ApiError
from tilecast_operator.kube.times import format_time
from tilecast_operator.observed.reports import RefusedReport

ROOT = Path(__file__).parent.parent
RULES = ROOT / "charts" / "tilecast" / "rules" / "tilecast.yaml"
TARGET = {"cluster": "west", "namespace": "tilecast", "pod": "a"}
TEAM = {"cluster": "west", "namespace": "tilecast"}
DEFECT = ({**TARGET, "result": "InternalError"}, "A search ended in a defect of Tilecast.")
EAST = {"cluster": "east", "namespace": "tilecast"}


@dataclass
class Tape:
    """The series of a Prometheus that scrapes once a minute, and the alerts expected over them."""

    minutes: int = 0
    series: dict[str, list[str]] = field(default_factory=dict)
    expected: list[dict[str, Any]] = field(default_factory=list)
    queries: list[dict[str, Any]] = field(default_factory=list)
    others: dict[str, str] = field(default_factory=dict)
    """Series of other exporters, with their value at every scrape."""

    def hold(self, registry: CollectorRegistry, minutes: int = 1, target: Mapping[str, str] = TARGET) -> None:
        """Scrape a registry that does not change for some minutes; other targets are silent."""
        self.hold_all([(registry, target)], minutes)

    def hold_all(self, targets: Sequence[tuple[CollectorRegistry, Mapping[str, str]]], minutes: int) -> None:
        """Scrape several registries at once."""
        values = {
            series(sample.name, {**sample.labels, **target}): f"{sample.value:.12g}"
            for registry, target in targets
            for family in registry.collect()
            for sample in family.samples
        }
        self._pass(minutes, values)

    def silence(self, minutes: int) -> None:
        """Let minutes pass in which nothing is scraped."""
        self._pass(minutes, {})

    def _pass(self, minutes: int, scraped: Mapping[str, str]) -> None:
        values = {**scraped, **self.others}
        for name in values.keys() - self.series.keys():
            self.series[name] = ["_"] * self.minutes
        for name, column in self.series.items():
            gap = "stale" if column and column[-1] not in ("_", "stale") else "_"
            column += [values[name]] * minutes if name in values else [gap] + ["_"] * (minutes - 1)
        self.minutes += minutes

    def quiet(self, *alerts: str) -> None:
        """Expect that none of these alerts fires now."""
        for alert in alerts:
            self.expected.append({"eval_time": f"{self.minutes - 1}m", "alertname": alert, "exp_alerts": []})

    def never(self, *alerts: str) -> None:
        """Expect that none of these alerts has fired so far."""
        for alert in alerts:
            fired = f'count_over_time(ALERTS{{alertname="{alert}", alertstate="firing"}}[{self.minutes}m])'
            self.queries.append({"expr": fired, "eval_time": f"{self.minutes - 1}m", "exp_samples": []})
            self.quiet(alert)

    def fires(self, alert: str, *fired: tuple[Mapping[str, str], str], severity: str = "") -> None:
        """Expect that this alert fires now, with these labels beside its severity and these summaries."""
        severities = [rule["labels"]["severity"] for rule in rules() if rule.get("alert") == alert]
        assert severity in severities or (not severity and len(severities) == 1)
        alerts_expected = [
            {
                "exp_labels": {"severity": severity or severities[0], **labels},
                "exp_annotations": {"summary": summary},
            }
            for labels, summary in fired
        ]
        self.expected.append({"eval_time": f"{self.minutes - 1}m", "alertname": alert, "exp_alerts": alerts_expected})

    def value(self, ratio: str, stage: str) -> float:
        """Return the current value of the only series of an error, in percent."""
        (column,) = (
            values
            for name, values in self.series.items()
            if name.startswith(f"tilecast_prediction_{ratio}_ratio{{") and f'stage="{stage}"' in name
        )
        return 100 * float(column[-1])

    def document(self) -> dict[str, Any]:
        """Return the tape as a test of promtool."""
        columns = [{"series": name, "values": " ".join(column)} for name, column in self.series.items()]
        checks = {"alert_rule_test": self.expected, "promql_expr_test": self.queries}
        return {"interval": "1m", "input_series": columns, **checks}


def series(name: str, labels: Mapping[str, str]) -> str:
    """Return a series in promtool's notation."""
    pairs = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{pairs}}}"


def rules() -> list[dict[str, Any]]:
    """Return every rule of the chart."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


IN_EAST = " in namespace tilecast of cluster east"
IN_WEST = " in namespace tilecast of cluster west"


def down(where: str, what: str = "Jobs run, but get no advice.") -> str:
    return f"Tilecast{where} is down or keeps restarting. {what}"


async def dead_and_alive(tape: Tape) -> None:
    """One operator of two clusters dies; one is replaced; none was ever there."""
    async with operator(Store()) as running:
        tape.hold(running.metrics.registry, 30, {**EAST, "pod": "b"})
        tape.never("TilecastDown")
        tape.hold(running.metrics.registry, 10)
        tape.hold(running.metrics.registry, 20, {**TARGET, "pod": "its-next"})
        tape.fires("TilecastDown", (EAST, down(IN_EAST)), severity="warning")
    tape.silence(20)
    tape.fires("TilecastDown", (EAST, down(IN_EAST)), (TEAM, down(IN_WEST)), severity="warning")


async def held_jobs_wait(tape: Tape) -> None:
    """An operator that jobs wait for dies."""
    async with operator(Store(), jobs=True, place=True) as running:
        tape.hold(running.metrics.registry, 30)
        tape.never("TilecastDown")
    tape.silence(15)
    text = down(IN_WEST, "Jobs in mode Initial may be waiting for it.")
    tape.fires("TilecastDown", (TEAM, text), severity="critical")


async def crash_loop(tape: Tape) -> None:
    """An operator is alive for one scrape in five."""
    async with operator(Store()) as running:
        tape.hold(running.metrics.registry, 30)
        tape.never("TilecastDown")
        for _ in range(6):
            tape.hold(running.metrics.registry)
            tape.silence(4)
            tape.quiet("TilecastNoLeader")
        tape.fires("TilecastDown", (TEAM, down(IN_WEST)), severity="warning")


async def restarts(tape: Tape) -> None:
    """An operator ends again and again, and is there whenever it is scraped."""
    async with operator(Store()) as running:
        started = series("tilecast_process_start_time_seconds", TARGET)
        for restart in range(4):
            tape.others[started] = str(restart)
            tape.hold(running.metrics.registry, 5)
        tape.hold(running.metrics.registry, 5)
        tape.fires("TilecastDown", (TEAM, down(IN_WEST)), severity="warning")
        tape.hold(running.metrics.registry, 30)
        tape.quiet("TilecastDown")


async def uninstalled(tape: Tape) -> None:
    """The Deployment is deleted, which kube-state-metrics tells; then a pod is gone whose Deployment is there."""
    deployments = {
        name: series("kube_deployment_spec_replicas", {**TEAM, "deployment": name}) for name in ("other", "a-tilecast")
    }
    async with operator(Store()) as running:
        tape.others = dict.fromkeys(deployments.values(), "1")
        tape.hold(running.metrics.registry, 30)
        del tape.others[deployments["a-tilecast"]]
        tape.silence(60)
        tape.never("TilecastDown")
        tape.others[deployments["a-tilecast"]] = "1"
        tape.hold(running.metrics.registry, 30)
    tape.silence(15)
    tape.fires("TilecastDown", (TEAM, down(IN_WEST)), severity="warning")


async def never_there(tape: Tape) -> None:
    """No operator at all."""
    tape.silence(5)
    tape.quiet("TilecastDown")
    tape.silence(5)
    tape.fires("TilecastDown", ({}, down("")), severity="warning")


async def no_node_and_a_dead_watch(tape: Tape) -> None:
    """Nothing happens, and watches are begun anew as the operator does; then nobody answers for nodes."""
    async with operator(Store(), nodes=()) as running:
        watched = running.metrics.watched

        def pass_minutes(minutes: int, *resources: str) -> None:
            """Let minutes pass; watches end every ten minutes by the tape's clock, which starts at the epoch."""
            for _ in range(minutes):
                for resource in resources:
                    watched.labels(resource).set(tape.minutes // 10 * 600)
                tape.hold(running.metrics.registry)

        pass_minutes(90, "nodes", "gpupools", "trainingjobs")
        tape.never("TilecastWatchStale")
        pass_minutes(40, "gpupools", "trainingjobs")
        text = "For 49m 0s the API server has answered no list and no watch of nodes."
        tape.fires("TilecastWatchStale", ({**TARGET, "resource": "nodes"}, text))


async def idle_config_maps(tape: Tape) -> None:
    """Jobs whose models lie in ConfigMaps are looked at every minute; nothing of them waits."""
    store = Store()
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100, "n_positions": 4096}
    store.config_maps["m"] = {"data": {"config.json": yaml.safe_dump(config)}}
    model = {"huggingFace": {"configMapKeyRef": {"name": "m"}}}
    for number in range(120):
        store.put(f"{JOBS}/{number}", job(str(number), model=model))
    async with operator(store, config_map_poll_s=600.0) as running:
        await settled(running)
        assert len(running.runtime.queue) >= 120, "they wait for their time"
        tape.hold(running.metrics.registry, 60)
        tape.quiet("TilecastBacklog")
        tape.quiet("TilecastWritesFailing")
        tape.quiet("TilecastInternalErrors")


async def refused_writes(tape: Tape) -> None:
    """The API server takes no write."""
    store = Store()

    def refuse(path: str) -> None:
        raise ApiError(503, "not now")

    for number in range(120):
        store.put(f"{JOBS}/{number}", job(str(number)))
    async with operator(store, retry_first_s=0.5, retry_most_s=0.5) as running:
        await settled(running)
        tape.hold(running.metrics.registry, 10)
        store.before_write = refuse
        for item in list(store.objects.values()):
            item["metadata"]["annotations"] = {}
            item["status"] = {}
            running.cache.put_object(store.put(f"{JOBS}/{item['metadata']['name']}", item))
        for _ in range(30):
            await asyncio.sleep(0.1)
            tape.hold(running.metrics.registry)
    text = "More than a fifth of the writes to trainingjobs fail."
    tape.fires("TilecastWritesFailing", ({**TEAM, "resource": "trainingjobs"}, text))
    tape.fires("TilecastBacklog", (TEAM, "120 objects wait, and none is answered."))


async def a_burst(tape: Tape) -> None:
    """More jobs than can be answered at once are no backlog as long as answers go out."""
    store = Store()

    def slowly(request: Request, pools: Sequence[Pool]) -> Advice:
        time.sleep(0.02)
        return on_first_pool(request, pools)

    async with operator(store, slowly, writers=1) as running:
        await settled(running)
        for number in range(200):
            training = {"sequenceLength": 512, "globalBatchSize": 8 * (1 + number)}
            running.cache.put_object(store.put(f"{JOBS}/{number}", job(str(number), training=training)))
        for _ in range(30):
            await asyncio.sleep(0.05)
            tape.hold(running.metrics.registry)
        tape.quiet("TilecastBacklog")


async def slow_searches(tape: Tape) -> None:
    """Searches that take three seconds."""
    store = Store()

    def slowly(request: Request, pools: Sequence[Pool]) -> Advice:
        """Search slowly, at the start too, when the operator warms up."""
        time.sleep(3.05)
        return on_first_pool(request, pools)

    async with operator(store, slowly) as running:
        await asyncio.sleep(3.1)
        await settled(running)
        tape.hold(running.metrics.registry, 10)
        for name in "ab":
            store.put(f"{JOBS}/{name}", job(name, objective="time" if name == "a" else "cost"))
            running.cache.put_object(store.objects[f"{JOBS}/{name}"])
            await asyncio.sleep(3.1)
            await settled(running)
            tape.hold(running.metrics.registry, 20)
        tape.fires("TilecastSearchSlow", (TEAM, "One search in twenty takes longer than 9.65s."))
        tape.hold(running.metrics.registry, 40)
        tape.quiet("TilecastSearchSlow")


def defective() -> Callable[[Request, Sequence[Pool]], Advice]:
    """Return a search that works the first time only."""
    calls: list[Request] = []

    def search(request: Request, pools: Sequence[Pool]) -> Advice:
        calls.append(request)
        if len(calls) > 1:
            raise RuntimeError("a defect")
        return on_first_pool(request, pools)

    return search


async def counted_defect(running: OperatorParts) -> None:
    """Wait until a search has failed by a defect and its job reports it."""
    async with asyncio.timeout(60):
        while not running.metrics.registry.get_sample_value(
            "tilecast_recommendations_total", {"result": "InternalError"}
        ):
            await asyncio.sleep(0.01)


async def first_defect(tape: Tape) -> None:
    """The first search that fails."""
    store = Store()
    async with operator(store, defective(), retry_first_s=60.0) as running:
        await settled(running)
        tape.hold(running.metrics.registry, 30)
        tape.quiet("TilecastInternalErrors")
        store.put(f"{JOBS}/a", job())
        running.cache.put_object(store.objects[f"{JOBS}/a"])
        await counted_defect(running)
        tape.hold(running.metrics.registry, 5)
        tape.fires("TilecastInternalErrors", DEFECT)
        tape.hold(running.metrics.registry, 60)
        tape.quiet("TilecastInternalErrors")


async def defect_before_the_first_scrape(tape: Tape) -> None:
    """The defect is there when Prometheus comes."""
    store = Store()
    store.put(f"{JOBS}/a", job())
    async with operator(store, defective(), retry_first_s=60.0) as running:
        await counted_defect(running)
        tape.hold(running.metrics.registry, 5)
        tape.fires("TilecastInternalErrors", DEFECT)


async def held_for_minutes(tape: Tape) -> None:
    """A job waits and cannot start."""
    async with operator(Store(), jobs=True, place=True) as running:
        tape.hold(running.metrics.registry, 10)
        tape.never("TilecastJobsHeld")
        running.metrics.oldest_held.set_function(lambda: 300.0)
        tape.hold(running.metrics.registry, 5)
        text = "A job has been waiting for Tilecast for 5m 0s and cannot start; ten seconds are promised."
        tape.fires("TilecastJobsHeld", (TEAM, text))


async def placed_and_let_go(tape: Tape) -> None:
    """Most jobs in mode Initial are placed; then most are let go too late, and some find no quota."""
    async with operator(Store(), jobs=True, place=True) as running:
        metrics = running.metrics
        metrics.placements.labels("Placed"), metrics.placements.labels("TooLate")
        for _ in range(6):
            tape.hold(metrics.registry, 10)
            metrics.placements.labels("Placed").inc(10)
            metrics.placements.labels("TooLate").inc()
        tape.never("TilecastPlacementsMissed", "TilecastPlacementsRequeued")
        for _ in range(12):
            tape.hold(metrics.registry, 10)
            metrics.placements.labels("TooLate").inc()
            metrics.requeued.inc()
        text = "5 jobs in mode Initial were let go without their node choice in the last hour: TooLate."
        tape.fires("TilecastPlacementsMissed", ({**TEAM, "outcome": "TooLate"}, text))
        text = "5 jobs could not start where they were placed in the last hour, and may start elsewhere now."
        tape.fires("TilecastPlacementsRequeued", (TEAM, text))


async def another_release(tape: Tape) -> None:
    """Another release answers the same jobs."""
    async with operator(Store()) as running:
        tape.hold(running.metrics.registry, 10)
        tape.never("TilecastContendedObjects")
        running.metrics.contended.set_function(lambda: 3.0)
        tape.hold(running.metrics.registry, 15)
        text = "Another instance of Tilecast writes other answers to 3 objects."
        tape.fires("TilecastContendedObjects", (TEAM, text))


async def set_aside(tape: Tape) -> None:
    """An object at which the operator died."""
    async with operator(Store()) as running:
        tape.hold(running.metrics.registry, 10)
        tape.never("TilecastInputQuarantined")
        running.metrics.quarantined.labels("TrainingJob").set(1)
        tape.hold(running.metrics.registry, 10)
        text = "1 objects of kind TrainingJob are set aside, because the operator died while it read them."
        tape.fires("TilecastInputQuarantined", ({**TEAM, "kind": "TrainingJob"}, text))


async def never_answered(tape: Tape) -> None:
    """One job of a small cluster gets no answer."""
    async with operator(Store()) as running:
        tape.hold(running.metrics.registry, 10)
        tape.never("TilecastAnswerOverdue")
        running.metrics.oldest.labels("TrainingJob").set_function(lambda: 900.0)
        tape.hold(running.metrics.registry, 10)
        text = "A TrainingJob has been waiting for its answer for 15m 0s."
        tape.fires("TilecastAnswerOverdue", ({**TEAM, "kind": "TrainingJob"}, text))


async def interrupted_searches(tape: Tape) -> None:
    """Three searches in an hour take too much memory."""
    async with operator(Store()) as running:
        tape.hold(running.metrics.registry, 10)
        tape.never("TilecastSearchesInterrupted")
        for _ in range(3):
            running.metrics.restarts.labels("memory").inc()
            tape.hold(running.metrics.registry, 10)
        text = "3 processes that search were replaced in the last hour: memory."
        tape.fires("TilecastSearchesInterrupted", ({**TEAM, "cause": "memory"}, text))


async def unknown_nodes(tape: Tape) -> None:
    """GPUs that nobody knows."""
    async with operator(Store(), nodes=[node(), node("n2", "NVIDIA-Riddle")]) as running:
        await settled(running)
        tape.hold(running.metrics.registry, 20)
        tape.quiet("TilecastUnknownAccelerators")
        tape.hold(running.metrics.registry, 20)
        text = "1 GPU nodes are not priced: UnknownAccelerator."
        tape.fires("TilecastUnknownAccelerators", ({**TEAM, "reason": "UnknownAccelerator"}, text))


async def refused_reports(tape: Tape) -> None:
    """Three reports of four have a forged token."""
    store = store_with("a")
    async with operator(store, advise, discovery=True) as running:
        await until(running, store, lambda: status(store).get("recommendation"))
        target = status(store)["recommendation"]["stepSeconds"]["target"]
        for _ in range(20):
            tape.hold(running.metrics.registry)
            await running.observations.put("default", "a", "default@n1", body(stepSeconds=target))
        tape.quiet("TilecastObservationsRefused")
        for _ in range(70):
            for token in ("default@n1", "forged", "forged", "forged"):
                with suppress(RefusedReport):
                    await running.observations.put("default", "a", token, body(stepSeconds=target))
            tape.hold(running.metrics.registry)
        text = "Most step times that arrive by put are refused."
        tape.fires("TilecastObservationsRefused", ({**TEAM, "source": "put"}, text))


async def scored(running: OperatorParts, store: Store, factors: Mapping[str, float], reports: int = 1) -> None:
    """Report steps that take so many times the forecast of each job, and learn from them."""
    await until(running, store, lambda: all(status(store, name).get("recommendation") for name in factors))
    for name, factor in factors.items():
        target = status(store, name)["recommendation"]["stepSeconds"]["target"]
        for _ in range(reports):
            await running.observations.put("default", name, "default@n1", body(stepSeconds=factor * target))
    await until(running, store, lambda: all(status(store, name).get("observed") for name in factors))
    await settled(running)


GROUP = {**TEAM, "gpu": "h100-sxm", "precision": "bf16", "family": "decoder"}


async def chatty(tape: Tape) -> None:
    """One job reports a wrong step thirty times; seven right ones report once."""
    exact = {f"exact-{number}": 1.0 for number in range(7)}
    store = store_with("chatty", *exact)
    async with operator(store, advise, discovery=True) as running:
        await scored(running, store, exact)
        await scored(running, store, {"chatty": 2.0}, 30)
        for _ in range(120):
            tape.hold(running.metrics.registry)
        tape.quiet("TilecastPredictionErrorHigh")
        tape.quiet("TilecastPredictionBias")


async def far_off(tape: Tape) -> None:
    """Runs that contradict each other, so that no correction helps."""
    factors = {f"run-{number}": 2.0 if number % 2 else 0.5 for number in range(8)}
    store = store_with(*factors)
    async with operator(store, advise, discovery=True) as running:
        await scored(running, store, factors)
        tape.hold(running.metrics.registry, 30)
        tape.quiet("TilecastPredictionErrorHigh")
        tape.hold(running.metrics.registry, 60)
        off, side = (f"{tape.value(name, 'calibrated'):.4g}%" for name in ("run_absolute_relative_error", "bias"))
        text = f"Forecasts for h100-sxm bf16 decoder are off by {off} in the median job."
        tape.fires("TilecastPredictionErrorHigh", (GROUP, text))
        tape.quiet("TilecastPredictionBias")
        tape.hold(running.metrics.registry, 6 * 60)
        text = f"Calibrated forecasts for h100-sxm bf16 decoder stay {side} to one side."
        tape.fires("TilecastPredictionBias", (GROUP, text))


async def one_run(tape: Tape) -> None:
    """A single run that nobody repeated is no bias."""
    store = store_with("a")
    async with operator(store, advise, discovery=True) as running:
        await scored(running, store, {"a": 2.0})
        tape.hold(running.metrics.registry, 8 * 60)
        tape.quiet("TilecastPredictionBias")
        tape.quiet("TilecastPredictionErrorHigh")


async def narrow(tape: Tape) -> None:
    """One job that reports a lot runs outside its range, and then five of ten."""
    names = [f"j{number}" for number in range(10)]
    store = store_with(*names)
    async with operator(store, advise, discovery=True) as running:
        await until(running, store, lambda: all(status(store, name).get("recommendation") for name in names))
        target = status(store, names[0])["recommendation"]["stepSeconds"]["target"]
        tape.hold(running.metrics.registry, 10)

        async def report(name: str, times: int, factor: float) -> None:
            for _ in range(times):
                await running.observations.put("default", name, "default@n1", body(stepSeconds=target * factor))
                tape.hold(running.metrics.registry, 2)

        await report(names[0], 40, 4.0)
        tape.hold(running.metrics.registry, 90)
        tape.quiet("TilecastRangeTooNarrow")
        for number, name in enumerate(names[1:]):
            await report(name, 3, 1.0 if number % 2 == 0 else 4.0)
        tape.hold(running.metrics.registry, 90)
        text = "Only 50% of the jobs on h100-sxm ran inside the 90 % range."
        tape.fires("TilecastRangeTooNarrow", ({**TEAM, "gpu": "h100-sxm"}, text))


async def answers(tape: Tape, age_s: float, count: int = 40) -> None:
    """Answer jobs that were created `age_s` seconds ago."""
    store = Store()
    store.clock_s = 1_700_000_000.0
    async with operator(store) as running:
        await settled(running)
        tape.hold(running.metrics.registry, 5)
        for number in range(count):
            item = job(str(number))
            item["metadata"]["creationTimestamp"] = format_time(store.clock_s - age_s)
            store.put(f"{JOBS}/{number}", item)
            running.cache.put_object(store.objects[f"{JOBS}/{number}"])
        await asyncio.sleep(0.05)
        await settled(running)
        tape.hold(running.metrics.registry, 10)


async def answers_in_time(tape: Tape) -> None:
    """Forty jobs are answered at once."""
    await answers(tape, 0.0)
    tape.quiet("TilecastAnswersLate")


async def answers_late(tape: Tape) -> None:
    """Forty jobs are seen a minute after they were created."""
    await answers(tape, 60.0)
    tape.fires("TilecastAnswersLate", ({**TEAM, "kind": "TrainingJob"}, LATE))


async def few_answers_late(tape: Tape) -> None:
    """Every job of a small cluster is seen a minute after it was created."""
    await answers(tape, 60.0, 5)
    tape.fires("TilecastAnswersLate", ({**TEAM, "kind": "TrainingJob"}, LATE))


async def conflicts(tape: Tape) -> None:
    """Somebody else writes to the same objects."""
    async with operator(Store()) as running:
        for outcome in ("ok", "409", "409", "409"):
            running.metrics.count_write("trainingjobs", outcome)
        for _ in range(60):
            tape.hold(running.metrics.registry)
            for outcome in ("ok", "409", "409", "409"):
                running.metrics.count_write("trainingjobs", outcome)
        tape.never("TilecastWritesFailing")


LATE = "100% of the newest answers to a TrainingJob took longer than ten seconds."


async def one_leads_none_leads(tape: Tape) -> None:
    """A replica dies and the other leads; then none does."""
    async with operator(Store()) as first, operator(Store()) as second:
        replicas = ((first, {**TARGET, "pod": "x"}), (second, {**TARGET, "pod": "y"}))
        for leads, minutes in (((1, 0), 8), ((0, 1), 20)):
            for (replica, _), is_leader in zip(replicas, leads, strict=True):
                replica.metrics.set_leadership_metric(bool(is_leader))
            tape.hold_all([(replica.metrics.registry, labels) for replica, labels in replicas], minutes)
            tape.quiet("TilecastNoLeader")
        second.metrics.set_leadership_metric(False)
        tape.hold_all([(replica.metrics.registry, labels) for replica, labels in replicas], 10)
        text = "No replica of Tilecast in namespace tilecast of cluster west leads, so that none writes."
        tape.fires("TilecastNoLeader", (TEAM, text))


Story = Callable[[Tape], Awaitable[None]]
STORIES: Sequence[Story] = (
    dead_and_alive, held_jobs_wait, crash_loop, restarts, uninstalled, never_there, no_node_and_a_dead_watch,
    idle_config_maps, refused_writes, a_burst, slow_searches, held_for_minutes, placed_and_let_go,
    another_release, never_answered, interrupted_searches, set_aside, first_defect,
    defect_before_the_first_scrape, unknown_nodes,
    refused_reports, chatty, far_off, one_run, narrow, answers_in_time, answers_late, few_answers_late,
    conflicts, one_leads_none_leads,
)  # fmt: skip


@pytest.mark.cluster
async def test_alerts_fire_and_stay_quiet(tmp_path: Path) -> None:
    """Run promtool once over all stories."""
    tests = []
    for story in STORIES:
        tape = Tape()
        await story(tape)
        tests.append({"name": str(story.__doc__), **tape.document()})
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    checks = [check for test in tests for check in test["alert_rule_test"]]
    assert {check["alertname"] for check in checks if check["exp_alerts"]} == alerts, "each fires"
    assert {check["alertname"] for check in checks if not check["exp_alerts"]} == alerts, "and is quiet"
    bare = yaml.safe_load(RULES.read_text())
    for group in bare["groups"]:
        for rule in group["rules"]:
            rule.get("annotations", {}).pop("runbook_url", None)
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(bare))
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(document))
    done = subprocess.run(
        [ensure_or_fail("prometheus") / "promtool", "test", "rules", tmp_path / "tests.yaml"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
