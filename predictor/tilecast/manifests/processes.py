"""Count the processes that a launch line starts in the pods of a job, and refuse contradictions with the pods."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilecast.manifests.pods import JobPods, PodGroup
from tilecast.readers import UNKNOWN, LaunchLine, Script, find_last_value
from tilecast.spec import SpecError

_ALL = ("auto", "gpu")
"""Values with which torchrun starts a process for each GPU."""
_OWN_LAUNCHERS = ("axolotl", "llamafactory-cli", "trl")
"""Programs that start a process for each GPU of the pod themselves."""
_READS_NODES = "llamafactory-cli"
"""The only one of these programs that finds the processes of other pods, through the variable NNODES."""
_WHOLE_NODES = ("maxtext", "MaxText")
"""Programs that need one process for all GPUs of a pod and find the other pods themselves."""
_MPI = ("mpirun", "mpiexec", "horovodrun", "mpiexec.hydra")


@dataclass(frozen=True, slots=True)
class Processes:
    """The GPUs that a launch uses, with one process each."""

    gpus: int
    gpus_per_pod: int
    pods: int
    assumed: tuple[str, ...] = ()
    """Sentences on the assumptions that were made."""


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
        script: the script that contains it.
        pods: the pods of the job.
        group: the pods that run the line.
        variables: environment variables of the container.
        where: path of the container, for errors.

    Raises:
        SpecError: the line starts several separate runs, or the number of its processes is not the number of the pods'
            GPUs.
    """
    count, each = count_workers(pods, where)
    seen = _list_variables(line, script, variables)
    is_launched = bool(pods.launcher) and group.name == pods.launcher
    # The launcher's own variables do not reach the processes in other pods.
    visible = None if is_launched else script.variables.get(_VISIBLE)
    assumed = _require_visible_gpus(_find_visible_devices(line, script) or visible, each, where)
    counted = _count_by_launcher(line, script, pods, is_launched, seen, count, each, where)
    return replace(counted, assumed=(*counted.assumed, *assumed))


def _count_by_launcher(
    line: LaunchLine, script: Script, pods: JobPods, is_launched: bool, variables: Mapping[str, str], count: int,
    each: int, where: str,
) -> Processes:  # fmt: skip
    if is_launched:
        return _count_from_launcher_pod(line, script, pods, count, each, where)
    if pods.entrypoint is not None:
        return _count_ray_gpus(line, count, each, where)
    if line.launcher == "torchrun":
        return _count_torchrun_gpus(line, variables, count, each, where)
    if line.launcher == "deepspeed":
        if count > 1 and not {"hostfile", "H", "no-ssh"} & line.options.keys():
            raise SpecError(where, f"names no --hostfile, and {count} pods start it", "name it, or annotate the job")
        return _count_deepspeed_gpus(line, count, each, where)
    if line.launcher == "accelerate":
        return _count_accelerate_gpus(line, count, each, where)
    return _count_without_launcher(line, pods, variables, count, each, where)


_VISIBLE = "CUDA_VISIBLE_DEVICES"


def _find_commands(line: LaunchLine, script: Script) -> list[int]:
    """Return the indices of the commands that contain a launch line."""
    program = line.program.rpartition(" ")[2]
    return [index for index, words in enumerate(script.commands) if program in words]


def _list_variables(line: LaunchLine, script: Script, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a launch line sees.

    A script may change the container's variables. Other variables of a script are assumed not to be exported.
    """
    found = dict[str, str]()
    for name in variables:
        value = script.variables.get(name)
        found[name] = value if isinstance(value, str) else f"{UNKNOWN}{name}{UNKNOWN}"
    for index in _find_commands(line, script):
        found |= script.prefixes.get(index, {})
    return found


def _find_visible_devices(line: LaunchLine, script: Script) -> str | None:
    """Return the value assigned to CUDA_VISIBLE_DEVICES in the command of a launch line, or None."""
    for index in _find_commands(line, script):
        for word in [word for words in (*script.wrappers, script.commands[index]) for word in words]:
            name, equals, value = word.partition("=")
            if name == _VISIBLE and equals:
                return value
        if _VISIBLE in (prefix := script.prefixes.get(index, {})):
            return prefix[_VISIBLE]
    return None


def _require_visible_gpus(value: str | list[str] | None, each: int, where: str) -> tuple[str, ...]:
    """Raise SpecError if CUDA_VISIBLE_DEVICES hides GPUs of a pod.

    If the value of the variable is known only at run time, return a sentence that says so. Otherwise return an empty
    tuple.

    Raises:
        SpecError: the variable hides GPUs.
    """
    if value is None:
        return ()
    if isinstance(value, list) or UNKNOWN in value:
        return (f"{_VISIBLE} is computed by the run: all GPUs of a pod assumed.",)
    found = set[str]()
    for item in value.split(","):
        text = item.strip()
        # CUDA ignores everything behind the first device that is not there.
        if not text or (text.isdecimal() and (len(text) > 7 or int(text) >= each)) or text.startswith("-"):
            break
        found.add(text)
    if len(found) != each:
        problem = f"{_VISIBLE} shows {len(found)} GPUs, and a pod asks for {each}"
        raise SpecError(where, problem, "show all, or ask for fewer")
    return ()


def _parse_count(text: str) -> int | None:
    """Return a count up to a million, or None if the text is not one."""
    return int(text) if re.fullmatch(r"[0-9]{1,7}", text) and 0 < int(text) <= 2**20 else None


def _require_all_gpus(started: int, count: int, each: int, where: str) -> None:
    if started != count * each:
        problem = f"starts {started} processes, and the pods ask for {count * each} GPUs"
        raise SpecError(where, problem, "make them equal, or annotate the job")


def _require_nodes(nodes: int, count: int, where: str) -> None:
    if nodes < count:
        problem = f"is a run of {nodes} nodes, and {count} pods start it: they would be separate runs"
        raise SpecError(where, problem, f"give --nnodes {count}")
    if nodes > count:
        raise SpecError(where, f"waits for {nodes} nodes, and there are {count} pods", "make them equal")


def _read_stated_count(
    stated: int | None, names: Sequence[str], line: LaunchLine, fallback: int, what: str
) -> tuple[int | None, tuple[str, ...]]:
    """Return the count that a launch line states, and sentences on assumptions.

    If the count is known only at run time, return `fallback` with a sentence. If it is not stated, return None.
    """
    if stated is not None:
        return stated, ()
    if computed := next((name for name in names if name in line.computed), None):
        return fallback, (f"--{computed} is computed by the run: {fallback} {what} assumed.",)
    return None, ()


def _count_torchrun_gpus(
    line: LaunchLine, variables: Mapping[str, str], count: int, each: int, where: str
) -> Processes:
    options = line.options
    text = variables.get("PET_NNODES", "")
    nodes, assumed = _read_stated_count(line.nodes, ("nnodes",), line, count, "nodes")
    # An elastic run takes as many nodes as there are pods.
    if ":" in options.get("nnodes", ""):
        nodes = count
    if nodes is None and UNKNOWN in text:
        nodes, assumed = count, (f"PET_NNODES is not in the manifest: {count} nodes assumed.",)
    elif nodes is None and text:
        nodes = count if re.fullmatch(r"[0-9]{1,7}:[0-9]{1,7}", text) else _parse_count(text)
        if nodes is None:
            raise SpecError(where, f"PET_NNODES {text[:20]!r} is no count", "give a number")
    # By --standalone, every pod waits for processes of its own alone.
    if "standalone" in options:
        nodes, assumed = 1, ()
    _require_nodes(nodes or 1, count, where)
    own = options.get("nproc-per-node")
    processes, more = _read_stated_count(line.gpus_per_node, ("nproc-per-node",), line, each, "processes a pod")
    if processes is None:
        text = own or variables.get("PET_NPROC_PER_NODE", "1")
        if UNKNOWN in text:
            more = (f"PET_NPROC_PER_NODE is not in the manifest: {each} processes a pod assumed.",)
        processes = each if text in _ALL or UNKNOWN in text else _parse_count(text)
    if processes is None:
        raise SpecError(where, f"--nproc-per-node {text[:20]!r} is no count", "give a number")
    _require_all_gpus(processes * count, count, each, where)
    return Processes(count * each, each, count, (*assumed, *more))


def _count_deepspeed_gpus(line: LaunchLine, count: int, each: int, where: str) -> Processes:
    _require_devices(line, count, each, where)
    left = next((name for name in ("include", "i", "exclude", "e") if name in line.computed), None)
    picked = () if left is None else (f"{'-' * (1 + (len(left) > 1))}{left} is computed by the run: all GPUs assumed.",)
    processes, more = _read_stated_count(line.gpus_per_node, ("num-gpus",), line, each, "processes a pod")
    nodes, assumed = _read_stated_count(line.nodes, ("num-nodes", "nnodes"), line, count, "nodes")
    _require_nodes(count if nodes is None else nodes, count, where)
    _require_all_gpus((each if processes is None else processes) * count, count, each, where)
    return Processes(count * each, each, count, (*assumed, *more, *picked))


def _require_devices(line: LaunchLine, count: int, each: int, where: str) -> None:
    """Raise SpecError if DeepSpeed's --include or --exclude leaves out GPUs.

    Raises:
        SpecError: the option leaves out GPUs, or its value has an unknown form.
    """
    remedy = "use all GPUs of the pods, or annotate the job"
    if line.options.get("exclude") or line.options.get("e"):
        raise SpecError(where, "leaves GPUs out by --exclude", remedy)
    text = line.options.get("include") or line.options.get("i")
    if not text:
        return
    # Such as `worker-0@worker-1:0,2`. A host without numbers counts with all its GPUs.
    hosts = dict[str, int]()
    for part in text.split("@"):
        name, colon, numbers = part.strip().partition(":")
        if not name or name in hosts or (colon and not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", numbers)):
            raise SpecError(where, f"--include {text[:40]!r} is not read", remedy)
        hosts[name] = len(set(numbers.split(","))) if colon else each
    started = sum(hosts.values())
    if len(hosts) != count or started != count * each:
        problem = f"--include names {started} GPUs of {len(hosts)} hosts, and {count} pods have {count * each}"
        raise SpecError(where, problem, remedy)


def _count_accelerate_gpus(line: LaunchLine, count: int, each: int, where: str) -> Processes:
    total, assumed = _read_stated_count(line.gpus, ("num-processes",), line, count * each, "processes")
    if total is None and "config-file" in line.options:
        # The reader compares the configuration's own number.
        return Processes(count * each, each, count)
    if total is None and count > 1:
        raise SpecError(where, f"names no --num_processes, and {count} pods start it", "name it")
    nodes, more = _read_stated_count(line.nodes, ("num-machines",), line, count, "machines")
    if "config-file" not in line.options:
        _require_nodes(nodes or 1, count, where)
    _require_all_gpus(count * each if total is None else total, count, each, where)
    return Processes(count * each, each, count, (*assumed, *more))


def _count_from_launcher_pod(
    line: LaunchLine, script: Script, pods: JobPods, count: int, each: int, where: str
) -> Processes:
    """Return the GPUs that a launcher pod uses in other pods, by mpirun or by a launcher with a host file."""
    if line.launcher == "deepspeed":
        return _count_deepspeed_gpus(line, count, each, where)
    if line.launcher:
        remedy = "start it by mpirun or deepspeed, or annotate the job"
        raise SpecError(where, f"{line.launcher} in the launcher's pod starts nothing in the others", remedy)
    calls = _list_mpi_calls(script, line)
    stated = [_count_mpi_ranks(words, count, where) for words in calls]
    for started in {item for item in stated if item is not None}:
        if started:
            _require_all_gpus(started, count, each, where)
    if calls and all(stated):
        return Processes(count * each, each, count)
    if calls and None in stated and pods.slots is not None:
        _require_all_gpus(pods.slots * count, count, each, where)
        return Processes(count * each, each, count)
    sentence = f"The number of ranks is that of the GPUs: {count * each} assumed."
    return Processes(count * each, each, count, (sentence,))


_RANKS = ("-np", "-n", "--np", "-c", "--n")
_RANKS_PER_NODE = ("-N", "-npernode", "--npernode", "-ppn", "--ppn", "-perhost", "--ntasks-per-node")
_MAPPED = re.compile(r"ppr:([0-9]{1,7}):node(?::.*)?", re.IGNORECASE)


def _list_mpi_calls(script: Script, line: LaunchLine) -> list[Sequence[str]]:
    """Return the mpirun calls that start the program, each as the words of mpirun and its options."""
    found = list[Sequence[str]]()
    starts = [script.commands[index] for index in _find_commands(line, script)]
    program = line.program.rpartition(" ")[2]
    for words in (*script.wrappers, *(item[: item.index(program)] for item in starts)):
        place = next((index for index, word in enumerate(words) if word.rpartition("/")[2] in _MPI), None)
        if place is not None:
            found.append(words[place:])
    return found


def _count_mpi_ranks(words: Sequence[str], count: int, where: str) -> int | None:
    """Return the number of ranks that mpirun starts on `count` pods.

    Return None if its options give no number, and 0 if the number is known only at run time.

    Raises:
        SpecError: an option that gives the number cannot be read, or two options give different numbers.
    """
    remedy, found = "state all ranks by -np", set[int]()
    total, unread = False, ""
    for index, word in enumerate(words[1:], 1):
        option, equals, value = word.partition("=")
        text = value if equals else words[index + 1] if index + 1 < len(words) else ""
        factor = 1
        if option in _RANKS_PER_NODE:
            factor = count
        elif option in ("--map-by", "-map-by", "--rankfile", "-rf", "-npersocket", "--npersocket"):
            mapped = _MAPPED.fullmatch(text)
            is_placed = "ppr:" in text.lower() or "map-by" not in option
            if mapped is None:
                unread = f"{option} {text[:40]}" if is_placed and UNKNOWN not in text else unread
                continue
            text, factor = mapped[1], count
        elif option in ("-H", "-host", "--host", "--hosts"):
            unread = f"{option} {text[:40]}" if UNKNOWN not in text else unread
            continue
        elif option not in _RANKS:
            continue
        number = 0 if UNKNOWN in text else _parse_count(text)
        if number is None:
            raise SpecError(where, f"{option} {text[:20]!r} of mpirun is no count", "give a number")
        total = total or factor == 1
        found.add(number * factor)
    if len(found - {0}) > 1:
        numbers = " and ".join(map(str, sorted(found - {0})))
        raise SpecError(where, f"mpirun states {numbers} ranks on {count} pods", "make them equal")
    if unread and not total:
        raise SpecError(where, f"{unread!r} of mpirun does not say the number of ranks", remedy)
    return max(found) if found else None


_WORKERS = re.compile(r"--(?:num|n)[-_]workers(?:=(\d{1,7}))?")


def _count_ray_gpus(line: LaunchLine, count: int, each: int, where: str) -> Processes:
    """Return the GPUs that a job in a Ray cluster uses.

    A launcher starts processes only in the pod of the entrypoint. Ray Train starts as many workers as the script says.
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


def _count_litgpt(line: LaunchLine, count: int, each: int, where: str) -> Processes:
    """Return the GPUs of LitGPT, which starts as many processes in its pod as `--devices` says.

    Raises:
        SpecError: the options do not say all GPUs of all pods.
    """
    default = "auto" if line.program.endswith("pretrain") else "1"
    has_file = any(word.partition("=")[0] in ("--config", "-c") for word in line.arguments)
    for option, wanted, implied in (("--devices", each, default), ("--num_nodes", count, "1")):
        stated = find_last_value(line.arguments, option) or ("" if has_file and wanted > 1 else implied)
        if stated != str(wanted) and not (option == "--devices" and stated in ("auto", "-1")):
            what = f"says {option} {stated[:20]}" if stated and UNKNOWN not in stated else f"states no {option}"
            raise SpecError(where, f"{what}, and there are {count} pods of {each} GPUs", f"give {option} {wanted}")
    return Processes(count * each, each, count)


def _count_without_launcher(
    line: LaunchLine, pods: JobPods, variables: Mapping[str, str], count: int, each: int, where: str
) -> Processes:
    """Return the GPUs of a program without a launcher."""
    name = line.program.partition(" ")[0].rpartition("/")[2]
    if any(part in line.program for part in _WHOLE_NODES):
        return Processes(count * each, each, count)
    if name in _OWN_LAUNCHERS or line.program.startswith("axolotl"):
        nodes = variables.get("NNODES", "1") if name == _READS_NODES else "1"
        if count > 1 and nodes != str(count):
            problem = f"starts processes in its own pod, and there are {count} pods"
            remedy = f"set NNODES={count}" if name == _READS_NODES else "start it by torchrun or accelerate"
            raise SpecError(where, problem, remedy)
        return Processes(count * each, each, count)
    if name == "litgpt":
        return _count_litgpt(line, count, each, where)
    if each > 1:
        problem = f"starts one process in a pod of {each} GPUs, as far as the command says"
        raise SpecError(where, problem, "start it by torchrun, or annotate the job")
    # A literal rank is the same in all pods.
    has_ranks = pods.has_ranks or (UNKNOWN in variables.get("RANK", "") and "WORLD_SIZE" in variables)
    if count > 1 and not has_ranks:
        raise SpecError(
            where, f"is a separate run in each of {count} pods", "start it by torchrun, or annotate the job"
        )
    if count > 1 and UNKNOWN in variables.get("WORLD_SIZE", ""):
        return Processes(count, 1, count, (f"WORLD_SIZE is not in the manifest: {count} assumed.",))
    if variables.get("WORLD_SIZE", str(count)) != str(count) and UNKNOWN not in variables["WORLD_SIZE"]:
        problem = f"WORLD_SIZE is {variables['WORLD_SIZE'][:20]}, and {count} pods have one process each"
        raise SpecError(where, problem, "make them equal")
    return Processes(count, 1, count)
