"""Commands of the containers with GPUs: the Python program that they run, and a script in its place."""

from __future__ import annotations

from tilecast.api.fields import Document, FieldChange
from tilecast.jobs.interface import Job


def program(document: Document, job: Job) -> tuple[str, ...]:
    """The Python program that a job's GPU containers run, and what it is given, as the job is written; empty where its
    command names none by a word of its own."""
    for container in job.kind.containers(document, job).values():
        words = [str(word) for key in ("command", "args") for word in container.get(key) or ()]
        start = next((index for index, word in enumerate(words) if word.endswith(".py") and " " not in word), None)
        if start is not None:
            return tuple(words[start:])
    return ()


def running(document: Document, job: Job, script: str) -> list[FieldChange]:
    """What makes every GPU container run a script for bash, with MASTER_ADDR, where the first pod is reached, as the
    job's kind names it."""
    address = job.kind.main_address(document, job)
    lines = f'export MASTER_ADDR="{address}"\n{script}' if address and "$MASTER_ADDR" in script else script
    words = {"command": ["bash", "-c"], "args": [lines]}
    containers = job.kind.containers(document, job)
    return [FieldChange((*path, key), value) for path in containers for key, value in words.items()]
