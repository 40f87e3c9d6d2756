"""Count the processes that a launch line starts in the pods of a job, and refuse what contradicts the pods."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilecast.manifests.pods import JobPods, PodGroup
from tilecast.readers import UNKNOWN, LaunchLine, Script
from tilecast.spec import SpecError

_ALL = ("auto", "gpu")
"""Values by which torchrun starts a process for each GPU."""
_OWN_LAUNCHERS = ("axolotl", "llamafactory-cli", "trl")
"""Programs that start a process for each GPU of the pod themselves."""
_WHOLE_NODES = ("maxtext", "MaxText")
"""Programs of which one process drives all GPUs of a pod, and that find the other pods."""
_MPI = ("mpirun", "mpiexec", "horovodrun", "mpiexec.hydra")


@dataclass(frozen=True, slots=True)
class Processes:
    """The GPUs that a launch uses, one process each."""

    gpus: int
    gpus_per_pod: int
    pods: int
    assumed: tuple[str, ...] = ()
    """Sentences that say what was taken for granted."""


def count_workers(pods: JobPods, where: str) -> tuple[int, int]:
    """Return the number of pods with GPUs, and the GPUs of each.

    Raises:
        SpecError: no pod requests a GPU, or they request different numbers.
    """
    workers = [item for item in pods.groups if item.gpus and item.count]
    if not workers:
        raise SpecError(where, "no pod asks for a GPU", "add nvidia.com/gpu to the limits of a container")
    each = {item.gpus for item in workers}
    if len(each) > 1:
        counts = " and ".join(map(str, sorted(each)))
        raise SpecError(where, f"pods ask for {counts} GPUs", "give all pods equally many, or annotate the job")
    return sum(item.count for item in workers), each.pop()


def count_processes(
    line: LaunchLine, script: Script, pods: JobPods, group: PodGroup, variables: Mapping[str, str], where: str
) -> Processes:
    """Return the GPUs that a launch line uses.

    Args:
        line: the launch line.
        script: the script that holds it.
        pods: the pods of the job.
        group: the pods that run the line.
        variables: environment variables of the container.
        where: path of the container, for errors.

    Raises:
        SpecError: the line starts more or fewer processes than the pods have GPUs, or several separate runs.
    """
    count, each = count_workers(pods, where)
    if pods.launcher and group.name == pods.launcher:
        return _count_launched(line, script, pods, count, each, where)
    if pods.entrypoint is not None:
        return _count_ray(line, count, each, where)
    if line.launcher == "torchrun":
        return _count_torchrun(line, pods, variables, count, each, where)
    if line.launcher == "deepspeed":
        return _count_deepspeed(line, count, each, where)
    if line.launcher == "accelerate":
        return _count_accelerate(line, count, each, where)
    return _count_plain(line, pods, variables, count, each, where)


def _require_all(started: int, count: int, each: int, where: str) -> None:
    if started != count * each:
        problem = f"starts {started} processes, and the pods ask for {count * each} GPUs"
        raise SpecError(where, problem, "make them equal, or annotate the job")


def _require_nodes(nodes: int, count: int, where: str) -> None:
    if nodes < count:
        problem = f"is a run of {nodes} nodes, and {count} pods start it: they would be separate runs"
        raise SpecError(where, problem, f"give --nnodes {count}")
    if nodes > count:
        raise SpecError(where, f"waits for {nodes} nodes, and there are {count} pods", "make them equal")


def _read_world(
    stated: int | None, names: Sequence[str], line: LaunchLine, fallback: int, what: str
) -> tuple[int | None, tuple[str, ...]]:
    """Return a count that a line states, or the fallback with a sentence if only a run knows it, or else None."""
    if stated is not None:
        return stated, ()
    if computed := next((name for name in names if name in line.computed), None):
        return fallback, (f"--{computed} is computed by the run: {fallback} {what} assumed.",)
    return None, ()


def _count_torchrun(
    line: LaunchLine, pods: JobPods, variables: Mapping[str, str], count: int, each: int, where: str
) -> Processes:
    options = line.options
    text = variables.get("PET_NNODES", "")
    nodes, assumed = _read_world(line.nodes, ("nnodes",), line, count, "nodes")
    # An elastic run takes as many nodes as there are pods.
    if ":" in options.get("nnodes", ""):
        nodes = count
    if nodes is None and text:
        nodes = int(text) if text.isdecimal() else count
    _require_nodes(nodes or 1, count, where)
    own = options.get("nproc-per-node")
    processes, more = _read_world(line.gpus_per_node, ("nproc-per-node",), line, each, "processes a pod")
    if processes is None:
        text = own or variables.get("PET_NPROC_PER_NODE", "1")
        processes = each if text in _ALL else int(text) if text.isdecimal() and len(text) < 8 else None
    if processes is None:
        raise SpecError(where, f"--nproc-per-node {text[:20]!r} is no count", "give a number")
    _require_all(processes * count, count, each, where)
    return Processes(count * each, each, count, (*assumed, *more))


def _count_deepspeed(line: LaunchLine, count: int, each: int, where: str) -> Processes:
    if count > 1 and "hostfile" not in line.options and "no-ssh" not in line.options:
        raise SpecError(where, f"names no --hostfile, and {count} pods start it", "name it, or annotate the job")
    processes, more = _read_world(line.gpus_per_node, ("num-gpus",), line, each, "processes a pod")
    nodes, assumed = _read_world(line.nodes, ("num-nodes", "nnodes"), line, count, "nodes")
    _require_nodes(count if nodes is None else nodes, count, where)
    _require_all((each if processes is None else processes) * count, count, each, where)
    return Processes(count * each, each, count, (*assumed, *more))


def _count_accelerate(line: LaunchLine, count: int, each: int, where: str) -> Processes:
    total, assumed = _read_world(line.gpus, ("num-processes",), line, count * each, "processes")
    if total is None and "config-file" in line.options:
        # The reader compares the configuration's own number.
        return Processes(count * each, each, count)
    if total is None and count > 1:
        raise SpecError(where, f"names no --num_processes, and {count} pods start it", "name it")
    nodes, more = _read_world(line.nodes, ("num-machines",), line, count, "machines")
    if "config-file" not in line.options:
        _require_nodes(nodes or 1, count, where)
    _require_all(count * each if total is None else total, count, each, where)
    return Processes(count * each, each, count, (*assumed, *more))


def _count_launched(line: LaunchLine, script: Script, pods: JobPods, count: int, each: int, where: str) -> Processes:
    """Return the GPUs that a launcher pod uses in the others: by mpirun, or by a launcher with a file of hosts."""
    if line.launcher == "deepspeed":
        processes = line.gpus_per_node
        nodes = count if line.nodes is None else line.nodes
        _require_nodes(nodes, count, where)
        _require_all((each if processes is None else processes) * count, count, each, where)
        return Processes(count * each, each, count)
    if line.launcher:
        remedy = "start it by mpirun or deepspeed, or annotate the job"
        raise SpecError(where, f"{line.launcher} in the launcher's pod starts nothing in the others", remedy)
    started, assumed = _read_mpi(script, line), tuple[str, ...]()
    if started is None and pods.slots is not None:
        started = pods.slots * count
    if started == -1 or started is None:
        started, assumed = count * each, (f"The number of ranks is that of the GPUs: {count * each} assumed.",)
    _require_all(started, count, each, where)
    return Processes(count * each, each, count, assumed)


_RANKS = ("-np", "-n", "--np", "-c", "--n")


def _read_mpi(script: Script, line: LaunchLine) -> int | None:
    """Return the ranks that mpirun starts: None if it does not say, -1 if only a run knows it."""
    for words in script.commands:
        place = next((index for index, word in enumerate(words) if word.rpartition("/")[2] in _MPI), None)
        if place is None or line.program not in words:
            continue
        for index in range(place + 1, words.index(line.program)):
            option, equals, value = words[index].partition("=")
            if option in _RANKS:
                text = value if equals else words[index + 1] if index + 1 < len(words) else ""
                return -1 if UNKNOWN in text else int(text) if re.fullmatch(r"\d{1,7}", text) else None
        return None
    return -1


_WORKERS = re.compile(r"--(?:num|n)[-_]workers(?:=(\d{1,7}))?")


def _count_ray(line: LaunchLine, count: int, each: int, where: str) -> Processes:
    """Return the GPUs that a job in a Ray cluster uses.

    A launcher starts processes in the pod of the entrypoint alone. Ray Train starts as many workers as the script says.
    """
    if count * each == 1:
        return Processes(1, 1, 1)
    if line.launcher:
        if count == 1 and line.world in (None, each):
            return Processes(each, each, 1, ("The entrypoint runs in the pod with GPUs.",))
        remedy = "start workers by Ray, or annotate the job"
        raise SpecError(where, f"{line.launcher} starts processes in one pod of the cluster alone", remedy)
    for place, word in enumerate(line.arguments):
        if match := _WORKERS.fullmatch(word):
            text = match[1] or (line.arguments[place + 1] if place + 1 < len(line.arguments) else "")
            if text == str(count * each):
                sentence = f"{word.partition('=')[0]} {text} is read as the workers of Ray Train."
                return Processes(count * each, each, count, (sentence,))
    problem = "does not say how many workers Ray starts"
    raise SpecError(where, problem, "annotate the job with its model and training")


def _count_plain(
    line: LaunchLine, pods: JobPods, variables: Mapping[str, str], count: int, each: int, where: str
) -> Processes:
    """Return the GPUs of a program without a launcher."""
    name = line.program.partition(" ")[0].rpartition("/")[2]
    if any(part in line.program for part in _WHOLE_NODES):
        return Processes(count * each, each, count)
    if name in _OWN_LAUNCHERS or line.program.startswith("axolotl"):
        nodes = variables.get("NNODES", "1")
        if count > 1 and nodes != str(count):
            raise SpecError(
                where, f"starts processes in its own pod, and there are {count} pods", f"set NNODES={count}"
            )
        return Processes(count * each, each, count)
    if each > 1:
        problem = f"starts one process in a pod of {each} GPUs, as far as the command says"
        raise SpecError(where, problem, "start it by torchrun, or annotate the job")
    has_ranks = pods.has_ranks or {"RANK", "WORLD_SIZE"} <= variables.keys()
    if count > 1 and not has_ranks:
        raise SpecError(
            where, f"is a separate run in each of {count} pods", "start it by torchrun, or annotate the job"
        )
    if variables.get("WORLD_SIZE", str(count)) != str(count):
        problem = f"WORLD_SIZE is {variables['WORLD_SIZE'][:20]}, and {count} pods have one process each"
        raise SpecError(where, problem, "make them equal")
    return Processes(count, 1, count)
