"""Commands of the containers with GPUs: the Python program that they run, and a script that replaces it."""

from __future__ import annotations

from tilecast.api.fields import Document, FieldChange
from tilecast.jobs.interface import Job


def find_program(document: Document, job: Job) -> tuple[str, ...]:
    """Return the Python program that a job's GPU containers run, and its arguments, as the job states them.

    It is empty if no word of the command names a Python program.
    """
    for container in job.kind.containers(document, job).values():
        words = [str(word) for key in ("command", "args") for word in container.get(key) or ()]
        start = next((index for index, word in enumerate(words) if word.endswith(".py") and " " not in word), None)
        if start is not None:
            return tuple(words[start:])
    return ()


def replace_commands(document: Document, job: Job, script: str) -> list[FieldChange]:
    """Return the changes that make every GPU container run a bash script.

    If the script uses MASTER_ADDR and the job's kind knows the address of the first pod, the script first exports the
    address.
    """
    address = job.kind.main_address(document, job)
    lines = f'export MASTER_ADDR="{address}"\n{script}' if address and "$MASTER_ADDR" in script else script
    words = {"command": ["bash", "-c"], "args": [lines]}
    containers = job.kind.containers(document, job)
    return [FieldChange((*path, key), value) for path in containers for key, value in words.items()]
