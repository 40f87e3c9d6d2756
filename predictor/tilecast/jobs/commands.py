"""What the GPU containers of a job run: the program that they name, and a script in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilecast.api.fields import Document, FieldChange, Path
from tilecast.jobs import Job, requested


def program(document: Document, job: Job) -> tuple[str, ...]:
    """The Python program that a job's GPU containers run, and what it is given, as the job is written; empty where its
    command names none by a word of its own."""
    for container in _containers(document, job).values():
        words = [str(word) for key in ("command", "args") for word in container.get(key) or ()]
        start = next((index for index, word in enumerate(words) if word.endswith(".py") and " " not in word), None)
        if start is not None:
            return tuple(words[start:])
    return ()


def running(document: Document, job: Job, script: str) -> list[FieldChange]:
    """What makes every GPU container run a script for bash, with MASTER_ADDR, where the first pod is reached, as the
    job's kind names it."""
    meeting = _MEETINGS[job.kind.kind](document, job) if job.kind.kind in _MEETINGS else ""
    lines = f'export MASTER_ADDR="{meeting}"\n{script}' if meeting and "$MASTER_ADDR" in script else script
    words = {"command": ["bash", "-c"], "args": [lines]}
    return [FieldChange((*path, key), value) for path in _containers(document, job) for key, value in words.items()]


def _containers(document: Document, job: Job) -> dict[Path, Mapping[str, Any]]:
    """Where commands of GPU containers are written, and what is there."""
    spec = document["spec"]
    if job.kind.kind == "TrainJob":
        return {("spec", "trainer"): spec.get("trainer") or {}}
    found: dict[Path, Mapping[str, Any]] = {}
    for pods in job.workers:
        pod: Any = document
        for part in pods.path:
            pod = pod[part]
        for index, container in enumerate(pod["containers"]):
            if requested(container.get("resources")):
                found[*pods.path, "containers", index] = container
    return found


def _first_pod(document: Document, job: Job) -> str:
    """The first GPU pod of a JobSet by the name that its headless service gives it (JobSet, spec.network)."""
    network = document["spec"].get("network") or {}
    return f"${{MASTER_ADDR:-{job.name}-{job.workers[0].name}-0-0.{network.get('subdomain') or job.name}}}"


_MEETINGS: Mapping[str, Callable[[Document, Job], str]] = {
    "TrainJob": lambda document, job: "$PET_MASTER_ADDR",
    "JobSet": _first_pod,
}
"""Where a shell in a pod finds the address of the first one, by kind, where that is not in MASTER_ADDR: Kubeflow
Trainer sets torchrun's own PET_MASTER_ADDR, and a JobSet sets nothing."""
