"""Store of the measured runs and of who measured them. It is limited in size, and filled from stored objects."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from tilecast.api import pool_learning
from tilecast.api.calibration import MAX_RUNS, ObservedRun, read_pool_runs
from tilecast.api.pool_learning import MAX_FORGOTTEN, MAX_KEPT, ForgetRequest
from tilecast_operator.observed.earlier_runs import round_run_values

_BY_AGE = attrgetter("time", "uid")
GENERATED = re.compile(r"-([bcdfghjklmnpqrstvwxz2456789]{5}|\d+)$")
"""Suffix that the API server appends to `generateName`, or that people append to a job's name to run it again."""


def name_template(name: str) -> str:
    """Return a job's name without its generated suffix, so that repetitions of a job give the same text."""
    return GENERATED.sub("", name)


class RunStore:
    """The newest runs of every pool. Belongs to one event loop.

    Args:
        is_on: whether the store keeps runs at all.
        on_change: function to call with every run that is added, changed or removed.
    """

    def __init__(self, *, is_on: bool = True, on_change: Callable[[ObservedRun], None] = lambda item: None) -> None:
        self._is_on = is_on
        self._on_change = on_change
        self._runs: dict[str, dict[str, ObservedRun]] = {}
        """Runs by pool, then by UID of the job."""
        self._of_job: dict[str, ObservedRun] = {}
        """Runs by UID of the job."""
        self._forgotten: dict[str, list[tuple[ForgetRequest, str]]] = {}
        """Requests to forget runs of each pool, with their times."""
        self._of_workload: dict[tuple[str, str], dict[str, ObservedRun]] = {}
        """Runs by namespace and workload, then by UID of the job."""
        self._of_template: dict[tuple[str, str], dict[str, ObservedRun]] = {}
        """Runs by namespace and template of the job's name, then by UID of the job."""

    def restore_runs(
        self, pool: str, runs: Iterable[ObservedRun], forgotten: Sequence[tuple[ForgetRequest, str]] = ()
    ) -> None:
        """Add the saved runs of a pool, except forgotten ones.

        A run is not added if the store has an equal or newer state of it.
        """
        if forgotten:
            known = self._forgotten.setdefault(pool, [])
            known += [item for item in forgotten if item not in known]
            del known[:-MAX_FORGOTTEN]
            self.drop_runs(pool, [uid for uid, item in self._runs.get(pool, {}).items() if self.is_forgotten(item)])
        for item in runs if self._is_on else ():
            known_run = self._runs.get(pool, {}).get(item.uid)
            is_better = known_run is None or _run_sort_key(known_run) < _run_sort_key(item)
            if is_better and not self.is_forgotten(item):
                self.store_run(item)

    def restore_status_runs(self, pool: str, status: Mapping[str, Any]) -> bool:
        """Add the runs that earlier releases stored in a pool's status. Return whether there were any.

        Their origin is unknown.
        """
        gpu = (status.get("summary") or {}).get("gpu")
        runs = read_pool_runs(pool, str(gpu), status) if gpu else []
        self.restore_runs(pool, [item for item in runs if item.uid not in self._of_job])
        return bool(runs)

    def store_run(self, item: ObservedRun) -> None:
        """Store the current state of a run.

        A job has at most one run, and a namespace keeps only its newest `MAX_RUNS` runs on a pool. If a pool has more
        than `MAX_KEPT` runs, drop the oldest run of the namespace with the most runs.
        """
        if not self._is_on:
            return
        if (before := self._of_job.get(item.uid)) is not None:
            self._remove_run(before)
        self._of_job[item.uid] = item
        members = self._runs.setdefault(item.run.pool, {})
        members[item.uid] = item
        self._of_workload.setdefault((item.run.namespace, item.run.workload), {})[item.uid] = item
        self._of_template.setdefault((item.run.namespace, name_template(item.job)), {})[item.uid] = item
        counts = Counter(one.run.namespace for one in members.values())
        largest = counts.most_common(1)[0][0] if len(members) > MAX_KEPT else item.run.namespace
        if counts[largest] > (0 if len(members) > MAX_KEPT else MAX_RUNS):
            oldest = min((one.time, uid) for uid, one in members.items() if one.run.namespace == largest)
            self.drop_run(oldest[1])
        is_same = (
            before is not None
            and before.run.workload == item.run.workload
            and round_run_values(before) == round_run_values(item)
        )
        for one in () if is_same else (before, item):
            if one is not None:
                self._on_change(one)

    def drop_run(self, uid: str) -> bool:
        """Remove the run of the job with a UID. Return whether the store had the run."""
        item = self._of_job.get(uid)
        if item is not None:
            self._remove_run(item)
            self._on_change(item)
        return item is not None

    def drop_runs(self, pool: str, uids: Iterable[str]) -> None:
        """Remove runs of a pool."""
        for uid in uids:
            if uid in self._runs.get(pool, {}):
                self.drop_run(uid)

    def forget_runs(self, request: ForgetRequest, now: str, pool: str) -> int:
        """Forget the runs of a pool that a request selects, up to now. Return how many were removed.

        The request is remembered, so that `restore_runs` does not add these runs again.
        """
        members = self._runs.get(pool, {})
        gone = [uid for uid, item in members.items() if request.matches(item)]
        self.drop_runs(pool, gone)
        rest = [item for item in self._forgotten.get(pool, []) if item[0] != request]
        self._forgotten[pool] = [*rest, (request, now)][-MAX_FORGOTTEN:]
        return len(gone)

    def forget_namespace(self, namespace: str, uid: str | None = None) -> bool:
        """Forget the runs of a deleted namespace. Return whether there were any.

        If `uid` is given, the namespace exists, and only runs of an earlier namespace of the same name are forgotten.
        """
        runs = [item for item in self._of_job.values() if item.run.namespace == namespace]
        gone = [item for item in runs if uid is None or item.namespace_uid not in ("", uid)]
        for item in gone:
            self.drop_run(item.uid)
        return bool(gone)

    def pools(self) -> set[str]:
        """Return the pools that have had runs or requests to forget runs."""
        return {*self._runs, *self._forgotten}

    def namespaces(self) -> set[str]:
        """Return the namespaces of the runs."""
        return {item.run.namespace for item in self._of_job.values()} - {""}

    def make_learning_document(self, pool: str) -> dict[str, Any]:
        """Return the PoolLearning of a pool."""
        return pool_learning.pool_learning_document(pool, self.list_pool_runs(pool), self._forgotten.get(pool, ()))

    def list_pool_runs(self, pool: str) -> list[ObservedRun]:
        """Return the runs of a pool, oldest first."""
        return sorted(self._runs.get(pool, {}).values(), key=_BY_AGE)

    def find_workload_runs(self, namespace: str, workload: str) -> Mapping[str, ObservedRun]:
        """Return the runs of a workload in a namespace, by UID of the job."""
        return self._of_workload.get((namespace, workload), {})

    def find_template_runs(self, namespace: str, name: str) -> Mapping[str, ObservedRun]:
        """Return the runs of jobs in a namespace with the same `name_template`, by UID of the job."""
        return self._of_template.get((namespace, name), {})

    def list_all_runs(self) -> list[ObservedRun]:
        """Return the runs of every pool, oldest first."""
        return sorted(self._of_job.values(), key=_BY_AGE)

    def is_forgotten(self, item: ObservedRun) -> bool:
        """Return whether a request to forget runs selects this run."""
        forgotten = self._forgotten.get(item.run.pool, ())
        return any(request.matches(item) and item.time <= made for request, made in forgotten)

    def _remove_run(self, item: ObservedRun) -> None:
        namespace = item.run.namespace
        del self._of_job[item.uid], self._runs[item.run.pool][item.uid]
        for known, name in ((self._of_workload, item.run.workload), (self._of_template, name_template(item.job))):
            del known[namespace, name][item.uid]
            if not known[namespace, name]:
                del known[namespace, name]


def _run_sort_key(item: ObservedRun) -> tuple[str, str, str, str]:
    """Return a sort key for a run: first its time, then its origin. Unknown origins sort first."""
    return item.time, item.source, item.account, item.namespace_uid
