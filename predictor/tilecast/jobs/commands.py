"""Read and replace the commands of containers that request GPUs."""

from __future__ import annotations

from tilecast.api.fields import Document, FieldChange
from tilecast.jobs.interface import Job


def find_program(document: Document, job: Job) -> tuple[str, ...]:
    """Return the Python file that a job's GPU containers run, followed by the arguments of the file.

    If no word of a command ends in `.py`, return an empty tuple.
    """
    for container in job.kind.containers(document, job).values():
        words = [str(word) for key in ("command", "args") for word in container.get(key) or ()]
        start = next((index for index, word in enumerate(words) if word.endswith(".py") and " " not in word), None)
        if start is not None:
            return tuple(words[start:])
    return ()


def replace_commands(document: Document, job: Job, script: str) -> list[FieldChange]:
    """Return the changes that make every GPU container of a job run a bash script.

    If the script uses MASTER_ADDR and the kind does not set that variable, an export of it is put first.
    """
    address = job.kind.find_main_address(document, job)
    lines = f'export MASTER_ADDR="{address}"\n{script}' if address and "$MASTER_ADDR" in script else script
    words = {"command": ["bash", "-c"], "args": [lines]}
    containers = job.kind.containers(document, job)
    return [FieldChange((*path, key), value) for path in containers for key, value in words.items()]
