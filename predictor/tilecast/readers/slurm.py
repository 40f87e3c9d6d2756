"""Read counts of nodes, tasks and GPUs from the options of Slurm's `sbatch` and `srun`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilecast.launch_options.options_table import UNKNOWN
from tilecast.spec import SpecError

MAX_COUNT = 2**20
_SHORT = {"N": "nodes", "n": "ntasks", "G": "gpus"}
_SAME = {"tasks-per-node": "ntasks-per-node"}
_COUNTS = ("nodes", "ntasks", "ntasks-per-node")
_GPUS = ("gpus", "gpus-per-node", "gpus-per-task", "gres")
_LINE = re.compile(r"#SBATCH\s(.*)")


@dataclass(frozen=True, slots=True)
class Allocation:
    """Numbers of nodes, tasks and GPUs in options of Slurm. A number that the options do not contain is None."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    tasks_per_node: int | None = None
    gpus: int | None = None
    """GPUs of all nodes."""
    tasks: int | None = None
    """Tasks of all nodes."""
    where: str = ""
    """Name of the options in errors."""

    @property
    def has_no_gpu(self) -> bool:
        """Whether the options say that there are no GPUs."""
        return 0 in (self.gpus_per_node, self.gpus)

    def with_step_options(self, step: Allocation) -> Allocation:
        """Return the counts of a job step. The options of the step take precedence over those of the job."""
        # Counts of all nodes are of the nodes of one of them.
        nodes = step.nodes or self.nodes
        per_node, tasks = step.gpus_per_node or self.gpus_per_node, step.tasks_per_node or self.tasks_per_node
        if step.tasks is not None and nodes and step.tasks % nodes == 0:
            tasks = step.tasks // nodes
        elif step.tasks is not None and step.tasks_per_node is None:
            # As many tasks as nodes, or fewer, are one on each of some nodes.
            tasks = 1 if step.tasks <= (nodes or 1) else None
        return Allocation(nodes, per_node, tasks, step.gpus or self.gpus, step.tasks or self.tasks, self.where)

    def list_variables(self) -> dict[str, str]:
        """Return the environment variables that Slurm sets from these counts, by name."""
        tasks = self.tasks
        if tasks is None and self.nodes and self.tasks_per_node:
            tasks = self.nodes * self.tasks_per_node
        values = {
            "SLURM_NNODES": self.nodes, "SLURM_JOB_NUM_NODES": self.nodes, "SLURM_GPUS_ON_NODE": self.gpus_per_node,
            "SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks, "SLURM_NTASKS_PER_NODE": self.tasks_per_node,
        }  # fmt: skip
        return {name: str(value) for name, value in values.items() if value is not None}


def read_header(text: str, where: str) -> Allocation:
    """Return the counts in the `#SBATCH` lines of a script. Slurm reads only the lines before the first command.

    For a heterogeneous job, all counts are None, because each of its parts has counts of its own.

    Raises:
        SpecError: a count is not a valid number, or two counts contradict each other.
    """
    words: list[str] = []
    for line in text.split("\n"):
        if line.strip() and not line.startswith("#"):
            break
        if match := _LINE.match(line):
            words += (added := match[1].partition(" #")[0].split())
            if added[:1] in (["hetjob"], ["packjob"]):
                return Allocation(where=where)
    return read_options(words, f"{where}: #SBATCH" if where else "#SBATCH", is_command=False)


def read_options(words: Sequence[str], where: str, *, is_command: bool = True) -> Allocation:
    """Return the counts in options of Slurm. In a command, the options end at the first word that is not one.

    Raises:
        SpecError: a count is not a valid number, or two counts contradict each other.
    """
    found: dict[str, int] = {}
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not word.startswith("-"):
            if is_command:
                break
            continue
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            key = _SAME.get(key, key)
        else:
            key, equals, value = _SHORT.get(word[1:2], word[1:2]), word[2:3], word[2:].removeprefix("=")
        if not equals and place < len(words) and not words[place].startswith("-"):
            if key not in (*_COUNTS, *_GPUS) and key not in _WITH_VALUE:
                continue
            value = words[place]
            place += 1
        count = _read_count(key, value.strip("\"'"), where, is_command)
        if count is not None:
            found[key] = count
    return _resolve_counts(found, where)


_WITH_VALUE = {
    "p", "partition", "A", "account", "t", "time", "J", "job-name", "c", "cpus-per-task", "mem", "w", "nodelist",
    "o", "output", "e", "error", "container-image", "container-mounts", "container-name", "cpu-bind", "mpi", "chdir",
    "D", "export", "exclude", "x", "constraint", "C", "qos", "q", "jobid", "reservation", "gpu-bind", "wait", "W",
    "distribution", "m", "cpus-per-gpu", "mem-per-gpu", "mem-per-cpu", "threads-per-core", "hint", "het-group", "r",
    "relative", "input", "i", "network", "signal", "comment", "d", "dependency", "container-workdir", "container-env",
    "nodefile", "F", "licenses", "L", "switches", "ntasks-per-gpu", "ntasks-per-socket", "gpus-per-socket", "gpu-freq",
    "cpu-freq", "tres-per-task", "mem-bind", "task-prolog", "task-epilog", "prolog", "epilog",
}  # fmt: skip
"""Other options whose value may be the next word."""


def _read_count(key: str, text: str, where: str, is_command: bool) -> int | None:
    """Return the number that an option of Slurm counts, or None if it counts nothing or the number is left open.

    A number is left open by a range, and by a value with variables or placeholders of a template.
    """
    if key not in (*_COUNTS, *_GPUS) or UNKNOWN in text or re.search(r"[<>{}$%]", text):
        return None
    if key in _COUNTS:
        least, _, most = text.partition("-")
        if (most and most != least) or (key == "nodes" and re.fullmatch(r"\d+(?:[-,:]\d+)+", text) and not most):
            return None
        count = least
    else:
        parts = [
            part.partition("(")[0].removeprefix("gres/").removeprefix("gres:").split(":") for part in text.split(",")
        ]
        if key == "gres":
            parts = [part[1:] for part in parts if part[0] == "gpu"]
            if not parts:
                return None
        numbers = [part[-1] if part and part[-1].isdecimal() else "1" for part in parts]
        count = str(sum(int(number[:9]) for number in numbers)) if text else ""
    least_count = 0 if is_command and key in _GPUS else 1
    if not (count.isdecimal() and len(count) <= 7 and least_count <= int(count) <= MAX_COUNT):
        raise SpecError(f"{where} --{key}", f"{text[:40]!r} is no count", "give a number")
    return int(count)


def _resolve_counts(found: Mapping[str, int], where: str) -> Allocation:
    """Return the allocation that follows from all counts together.

    Raises:
        SpecError: the counts contradict each other.
    """
    nodes, tasks, per_node = (found.get(key) for key in _COUNTS)
    if nodes and tasks and tasks % nodes == 0:
        # Then --ntasks-per-node is the most.
        per_node = tasks // nodes
    stated = {key: found[key] for key in ("gpus-per-node", "gres") if key in found}
    if "gpus" in found and nodes:
        if found["gpus"] % nodes:
            problem = f"{found['gpus']} GPUs are no multiple of {nodes} nodes"
            raise SpecError(f"{where} --gpus", problem, "correct --gpus or --nodes")
        stated["gpus"] = found["gpus"] // nodes
    if "gpus-per-task" in found and per_node:
        stated["gpus-per-task"] = found["gpus-per-task"] * per_node
    first = next(iter(stated), "")
    if nodes is None and "gpus" in found and (each := stated.get(first)) and found["gpus"] % each == 0:
        nodes = found["gpus"] // each
    for key, count in stated.items():
        if count != stated[first]:
            problem = f"is {count} GPUs a node, and --{first} is {stated[first]}"
            raise SpecError(f"{where} --{key}", problem, "correct one of them")
    return Allocation(nodes, stated.get(first), per_node, found.get("gpus"), tasks, where)
