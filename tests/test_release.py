"""Every job that waits for the operator is released before an uninstall, without a cluster."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import yaml

from existing_jobs import ONE_OF_EACH, set_suspend
from operator_store import patched
from test_place import EXISTING
from tilecast.jobs import ADMISSION_GATES, APPLIED, JOB_KINDS, MODE, NEXT_QUEUE, QUEUE, read_job
from tilecast_operator import release
from tilecast_operator.kube.client import ApiError
from tilecast_operator.objects.kinds import KINDS
from tilecast_operator.selector import LabelSelector

HELD = (*ONE_OF_EACH, "job-kueue", "job-gated")
POLICY = "/apis/admissionregistration.k8s.io/v1beta1/mutatingadmissionpolicybindings/tilecast-gate"


class HeldJobs:
    """Serves held jobs by path, in lists of two; some kinds may be absent or forbidden."""

    def __init__(self, absent: Sequence[str] = (), forbidden: Sequence[str] = ()) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.refused = {KINDS[kind].path(): 404 for kind in absent} | {KINDS[kind].path(): 403 for kind in forbidden}
        self.patches: list[str] = []
        self.conflicts = 0
        self.lines: list[str] = []
        self.namespaces = {"default": {"shard": "a"}}
        """Labels of the namespaces by name."""
        self.policies = {POLICY: {"metadata": {"uid": "p", "resourceVersion": "1"}}}

    def add(self, name: str, new_name: str, namespace: str = "default", **annotations: str) -> str:
        """Add an example that waits for the operator, and return its path."""
        document: dict[str, Any] = yaml.safe_load(next(item for item in EXISTING if item.stem == name).read_text())
        document["metadata"] |= {"name": new_name, "namespace": namespace, "resourceVersion": "1", "uid": new_name}
        document["metadata"]["annotations"] |= {MODE: "Initial", **annotations}
        set_suspend(document)
        path = KINDS[document["kind"]].path(namespace, new_name)
        self.jobs[path] = document
        return path

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        if path in self.refused:
            raise ApiError(self.refused[path], "no")
        if path in self.jobs:
            return copy.deepcopy(self.jobs[path])
        if path in self.policies:
            return self.policies[path]
        if path == KINDS["Namespace"].path():
            names = [{"metadata": {"name": name, "labels": labels}} for name, labels in self.namespaces.items()]
            return {"metadata": {}, "items": names}
        kind = next((kind for kind in JOB_KINDS if KINDS[kind].path() == path), None)
        if kind is None:
            raise ApiError(404, "not found")
        assert query is not None
        start = int(query.get("continue", 0))
        # Items of a list do not state their kind.
        jobs = [{k: v for k, v in item.items() if k != "kind"} for item in self.jobs.values() if item["kind"] == kind]
        onward = {"continue": str(start + 2)} if start + 2 < len(jobs) else {}
        return {"metadata": onward, "items": copy.deepcopy(jobs[start : start + 2])}

    async def patch(self, path: str, operations: list[dict[str, Any]]) -> dict[str, Any]:
        if self.conflicts:
            self.conflicts -= 1
            raise ApiError(409, "changed")
        self.patches.append(path)
        self.jobs[path] = patched(self.jobs[path], operations)
        return self.jobs[path]

    async def delete(self, path: str, uid: str, resource_version: str) -> dict[str, Any]:
        assert (uid, resource_version) == ("p", "1")
        return self.policies.pop(path)

    async def release(self, policy: str = "", *, is_dry: bool = False, selector: str = "") -> release.JobRelease:
        selected = LabelSelector.from_json(selector, "selector")
        work = release.JobRelease(self, self.lines.append, is_dry=is_dry, selector=selected, pause_s=0.0)  # type: ignore[arg-type]
        await work.run(policy)
        return work


async def test_every_job_that_is_held_is_let_go_once() -> None:
    cluster = HeldJobs()
    paths = {name: cluster.add(name, f"{name}-{number}") for number in range(3) for name in HELD}
    left = cluster.add("job", "let-go-before", **{APPLIED: "Placed"})
    done = await cluster.release()
    assert sum(done.freed.values()) == 3 * len(HELD) == len(cluster.patches) and not done.failed
    for name, path in paths.items():
        job = cluster.jobs[path]
        assert job["metadata"]["annotations"][APPLIED] == "Uninstalled"
        is_suspended = read_job(job).is_suspended
        assert is_suspended is (name in ("job-kueue", "job-gated")), "Kueue resumes its jobs itself"
    queued = cluster.jobs[paths["job-kueue"]]["metadata"]
    assert queued["labels"][QUEUE] == "team" and NEXT_QUEUE not in queued["annotations"]
    assert ADMISSION_GATES not in cluster.jobs[paths["job-gated"]]["metadata"]["annotations"]
    assert cluster.jobs[left]["spec"]["suspend"] is True
    again = await cluster.release()
    assert not again.freed and len(cluster.patches) == 3 * len(HELD)


async def test_a_dry_run_changes_nothing() -> None:
    cluster = HeldJobs()
    path = cluster.add("job", "a")
    done = await cluster.release("tilecast-gate", is_dry=True)
    assert done.freed == {"Job": 1} and not cluster.patches and cluster.jobs[path]["spec"]["suspend"] is True
    assert POLICY in cluster.policies
    assert cluster.lines == ["policy binding tilecast-gate would be deleted", "Job default/a would be let go"]


async def test_kinds_that_are_absent_are_passed_over_and_those_that_are_forbidden_told() -> None:
    cluster = HeldJobs(absent=("JobSet", "TrainJob"), forbidden=("PyTorchJob",))
    cluster.add("job", "a")
    done = await cluster.release()
    assert done.freed == {"Job": 1} and done.failed == 1
    assert "error: pytorchjobs cannot be listed: 403: no" in cluster.lines and not any(
        "jobset" in x for x in cluster.lines
    )


async def test_only_the_jobs_of_one_shard_are_let_go() -> None:
    cluster = HeldJobs()
    cluster.namespaces = {"left": {"shard": "a"}, "right": {"shard": "b"}, "none": {}}
    left, *others = [cluster.add("job", f"in-{name}", name) for name in cluster.namespaces]
    done = await cluster.release(selector='{"matchLabels": {"shard": "a"}}')
    assert done.freed == {"Job": 1} and cluster.patches == [left]
    assert all(cluster.jobs[path]["spec"]["suspend"] is True for path in others)
    cluster.refused[KINDS["Namespace"].path()] = 403
    done = await cluster.release(selector='{"matchLabels": {"shard": "b"}}')
    assert not done.freed and done.failed == 1 and cluster.lines[-1] == "error: namespaces cannot be listed: 403: no"


def test_a_selector_that_is_none_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["--namespace-selector", "shard=a"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --namespace-selector: 'shard=a' is no JSON") and "matchLabels" in line


async def test_an_edit_meanwhile_is_kept() -> None:
    cluster = HeldJobs()
    path = cluster.add("job", "a")
    cluster.conflicts = 2
    assert (await cluster.release()).freed == {"Job": 1} and cluster.jobs[path]["spec"]["suspend"] is False
    other = cluster.add("job", "b")
    cluster.conflicts = 1000
    assert (await cluster.release()).failed == 1 and cluster.jobs[other]["spec"]["suspend"] is True
    assert cluster.lines[-1].startswith("error: Job default/b was not let go: 409")


async def test_the_policy_goes_before_the_jobs() -> None:
    cluster = HeldJobs()
    cluster.add("job", "a")
    assert not (await cluster.release("tilecast-gate")).failed and not cluster.policies
    assert cluster.lines == ["policy binding tilecast-gate was deleted", "Job default/a was let go"]
    assert not (await cluster.release("tilecast-gate")).failed, "it is gone"


def test_without_a_cluster_it_says_so_in_one_line(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert release.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "KUBECONFIG" in line
