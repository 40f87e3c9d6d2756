"""Find the command that launches training: how many processes it starts, and which program with which arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile

from tilecast.launch_options.options_table import UNKNOWN
from tilecast.readers.shell import Script
from tilecast.readers.slurm import Allocation, read_options
from tilecast.spec import SpecError


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """A command that starts processes, and the program that each of them runs."""

    launcher: str
    """torchrun, deepspeed, accelerate, or empty for a program that is started directly."""
    program: str
    """Path of the training script, or the module after `-m`."""
    arguments: Sequence[str]
    nodes: int | None = None
    gpus_per_node: int | None = None
    gpus: int | None = None
    """Number of processes of all nodes. None if the command does not say it."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the launcher itself."""
    computed: frozenset[str] = frozenset()
    """Options of the launcher with values that are not literal."""
    step: Allocation | None = None
    """Counts that `srun` states in front of the launcher or program. None if the command has no `srun`."""

    @property
    def world(self) -> int | None:
        """Number of GPUs, or None if the command does not give it."""
        if self.gpus is not None:
            return self.gpus
        if self.nodes is None and self.computed.intersection(_NODES):
            return None
        return None if self.gpus_per_node is None else self.gpus_per_node * (self.nodes or 1)


_NODES = ("nnodes", "num-nodes", "num-machines")
"""Options of launchers that state the number of nodes."""
_LAUNCHERS = ("torchrun", "deepspeed", "accelerate", "torch.distributed.run", "torch.distributed.launch")
_TRAINERS: Mapping[str, Sequence[str]] = {
    "axolotl": ("train",),
    "llamafactory-cli": ("train",),
    "tune": ("run",),
    "litgpt": (
        "pretrain",
        "finetune",
        "finetune_full",
        "finetune_lora",
        "finetune_qlora",
        "finetune_adapter",
        "finetune_adapter_v2",
    ),
    "trl": ("sft", "dpo", "kto", "reward", "grpo"),
}
"""Programs that start training themselves, and the subcommands that do."""
_SINGLE = {
    "standalone", "no-python", "module", "m", "use-env", "quiet", "debug", "multi-gpu", "use-fsdp", "use-deepspeed",
    "same-network", "tpu", "cpu", "use-cpu", "use-xpu", "ipex", "use-megatron-lm", "use-parallelism-config",
    "downcast-bf16", "enable-cpu-affinity", "dynamo-use-dynamic", "dynamo-use-fullgraph",
    "dynamo-use-regional-compilation", "tpu-use-cluster", "no-tpu-cluster", "tpu-use-sudo", "virtual-local-rank",
    "force-multi", "no-local-rank", "no-ssh", "no-ssh-check", "save-pid", "bind-cores-to-rank", "elastic-training",
}  # fmt: skip
"""Launcher options that take no value."""
_SHELLS = ("python", "python3", "srun", "mpirun", "mpiexec", "uv", "env", "numactl", "singularity", "apptainer")


def find_launch(script: Script) -> LaunchLine:
    """Return the only launch line of a script.

    Raises:
        SpecError: the script has no launch line, or several different ones.
    """
    found = [line for words in script.commands if (line := read_command(words, script.name)) is not None]
    launched = [line for line in found if line.launcher] or found
    if not launched:
        strange = _find_unknown_program(script)
        problem = f"holds no launch line{f': {strange!r} is no training program that is known' if strange else ''}"
        raise SpecError(script.name or "script", problem, "give the command itself behind --")
    if any(line != launched[0] for line in launched[1:]):
        names = [*dict.fromkeys(line.program[:60] for line in launched)]
        programs = ", ".join([*names[:3], *(["…"] if len(names) > 3 else [])])
        problem = f"launches {len(launched)} jobs ({programs})"
        raise SpecError(script.name or "script", problem, "give one of the commands behind --")
    return add_allocation_counts(launched[0], script.batch, script.name)


_OPTIONS_OF_A_TRAINER = 3
"""Options from which a command of an unknown program looks like training."""


def _find_unknown_program(script: Script) -> str:
    """Return the program and subcommand of the command with the most options, or "" if no command has several."""
    counts = [sum(word.startswith("--") for word in words) for words in script.commands]
    if not counts or max(counts) < _OPTIONS_OF_A_TRAINER:
        return ""
    words = [word for word in script.commands[counts.index(max(counts))] if "=" not in word or word[:1] == "-"]
    return " ".join(takewhile(lambda word: not word.startswith("-"), words[:2]))[:60]


def add_device_count(line: LaunchLine, script: Script | None, words: Sequence[str]) -> LaunchLine:
    """Return a launch line with the GPUs that its devices say, if the launcher is not told their number.

    Counted are `--include` of deepspeed, `--gpu_ids` of Accelerate, CUDA_VISIBLE_DEVICES in front of the command or
    exported, and `-np` of mpirun.

    Args:
        line: the launch line.
        script: the script that holds it, or None.
        words: the words of its command.
    """
    if line.world is not None or line.computed.intersection(_COUNTS):
        return line
    if line.launcher == "deepspeed" and "include" in line.options:
        hosts = [host.partition(":")[2].split(",") for host in line.options["include"].split("@")]
        if not all(slot.isdecimal() for slots in hosts for slot in slots):
            return line
        each = len(hosts[0]) if len({len(slots) for slots in hosts}) == 1 else None
        return replace(line, nodes=len(hosts), gpus_per_node=each, gpus=sum(map(len, hosts)))
    if line.launcher == "accelerate" and (ids := line.options.get("gpu-ids", "all")) != "all":
        return replace(line, gpus=_count_devices(ids))
    if not line.launcher:
        mpi = next(
            (place for place, word in enumerate(words) if word.rpartition("/")[2] in ("mpirun", "mpiexec")), None
        )
        before = [] if mpi is None else words[mpi:]
        ranks = [after for word, after in pairwise(before) if word in ("-np", "--np", "-n")]
        if mpi is not None:
            return replace(line, gpus=int(ranks[0])) if ranks and re.fullmatch("[1-9][0-9]{0,5}", ranks[0]) else line
    has_all = line.options.get("nproc-per-node") in ("gpu", "auto")
    is_counted = line.launcher == "torchrun" and not has_all
    if is_counted or line.step is not None or line.options.keys() & {"hostfile", "exclude", "config-file"}:
        return line
    count = _count_devices(_find_visible_devices(script, words))
    # Trainer makes one process of several GPUs if nothing launches it, which is no plan of ours.
    is_plain = not line.launcher and line.program.partition(" ")[0] not in _TRAINERS
    return line if count is None or (is_plain and count > 1) else replace(line, gpus_per_node=count)


_COUNTS = ("nproc-per-node", "num-gpus", "num-processes")


def _find_visible_devices(script: Script | None, words: Sequence[str]) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for a command, or "" if it is not set."""
    name = "CUDA_VISIBLE_DEVICES"
    stated = next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")
    if stated or script is None:
        return stated
    places = [place for place, command in enumerate(script.commands) if command is words]
    before = next((script.prefixes[place][name] for place in places if name in script.prefixes.get(place, {})), None)
    value = script.variables.get(name, "") if before is None else before
    return value if isinstance(value, str) else ""


def _count_devices(text: str) -> int | None:
    """Return the number of devices in a list such as "0,1,3", or None if the text is no list of numbers."""
    found = [item.strip() for item in text.split(",")]
    return len(set(found)) if all(re.fullmatch("[0-9]{1,4}", item) for item in found) else None


def add_allocation_counts(line: LaunchLine, batch: Allocation, name: str) -> LaunchLine:
    """Return a launch line, completed by the counts in `#SBATCH` lines and in the options of srun.

    Args:
        line: the launch line.
        batch: counts of the `#SBATCH` lines.
        name: name of the script in errors, empty for a command.

    Raises:
        SpecError: the launch line contradicts these counts.
    """
    asked = batch if line.step is None else batch.with_step_options(line.step)
    where = f"{name}: " if name else ""
    tasks = asked.tasks_per_node
    is_started = line.launcher == "torchrun" and line.step is not None and line.gpus_per_node is not None
    if is_started and asked.nodes and tasks and tasks > 1 and line.nodes == asked.nodes * tasks:
        # srun may start an agent of torchrun for each GPU, which then counts as a node.
        line, tasks = replace(line, nodes=asked.nodes, gpus_per_node=tasks * (line.gpus_per_node or 1)), 1
    stated = next((key for key in _NODES if key in line.options), "")
    # A loop may start srun once for each node.
    known = {batch.nodes, asked.nodes} - {None}
    if line.nodes and known and line.nodes not in known and ":" not in line.options.get(stated, ""):
        problem = f"says {line.nodes}, and Slurm gives {' or '.join(map(str, known))} nodes"
        raise SpecError(f"{where}--{stated}", problem, "correct one of them")
    # A loop's own srun is on one of the nodes that a computed number counts.
    is_part = line.step is not None and line.step.nodes is not None and line.computed.intersection(_NODES)
    nodes = line.nodes or (batch.nodes if is_part else asked.nodes)
    states_nodes = stated or line.computed.intersection(_NODES)
    if line.launcher == "torchrun" and not states_nodes and nodes and nodes > 1:
        problem = f"runs on one node each without --nnodes, and Slurm gives {nodes} nodes"
        remedy = f"add --nnodes={nodes} with --rdzv-endpoint, or ask for one node"
        raise SpecError(f"{where}torchrun", problem, remedy)
    room = asked.gpus_per_node
    if room and line.gpus_per_node and line.gpus_per_node > room:
        problem = f"starts {line.gpus_per_node} processes a node, and Slurm gives {room} GPUs"
        raise SpecError(f"{where}{line.launcher}", problem, "correct one of them")
    whole = room * nodes if room and nodes else asked.gpus
    if whole and line.world and line.world > whole:
        problem = f"starts {line.world} processes, and Slurm gives {whole} GPUs"
        raise SpecError(f"{where}{line.launcher}", problem, "correct one of them")
    if line.step is not None and tasks and tasks > 1:
        if line.launcher:
            problem = f"srun starts it {tasks} times on each node"
            raise SpecError(f"{where}{line.launcher}", problem, "give srun --ntasks-per-node=1")
        if room and tasks != room:
            problem = f"starts {tasks} tasks on each node, and Slurm gives {room} GPUs"
            raise SpecError(f"{where}srun", problem, "correct --ntasks-per-node or the GPUs")
    per_node = line.gpus_per_node or room or (None if line.launcher else tasks)
    gpus = line.gpus
    if gpus is None and per_node is None and not line.launcher:
        gpus = asked.gpus
    return replace(line, nodes=nodes, gpus_per_node=per_node, gpus=gpus)


def read_command(words: Sequence[str], where: str) -> LaunchLine | None:
    """Return what a command launches, or None if it launches no training.

    Raises:
        SpecError: the counts of the launcher or of srun are not valid numbers, or contradict each other.
    """
    line = _find_program(words, where)
    place = next((place for place, word in enumerate(words[:40]) if word.rpartition("/")[2] == "srun"), None)
    if line is None or place is None:
        return line
    step = read_options(words[place + 1 :], f"{where}: srun" if where else "srun")
    return None if step.has_no_gpu else replace(line, step=step)


def _find_program(words: Sequence[str], where: str) -> LaunchLine | None:
    """Return the launcher and the program of a command, but not the counts that `srun` sets."""
    has_python = False
    for place, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name in _LAUNCHERS and (name != "accelerate" or words[place + 1 : place + 2] == ["launch"]):
            return _read_launcher(name, words[place + 1 + (name == "accelerate") :], where)
        if name in _TRAINERS and words[place + 1 : place + 2] and words[place + 1] in _TRAINERS[name]:
            if name == "tune":
                return _read_launcher("torchrun", words[place + 2 :], where, program="torchtune")
            program = f"{name} {words[place + 1]}"
            return LaunchLine("", program, words[place + 2 :])
        if word == "-m" and words[place + 1 : place + 2] and has_python:
            module = words[place + 1]
            if module in _LAUNCHERS:
                continue
            return LaunchLine("", module, words[place + 2 :])
        if name.endswith(".py") and place <= 40:
            before = {one.rpartition("/")[2] for one in words[:place]}
            if before & set(_SHELLS) or place == 0:
                return LaunchLine("", word, words[place + 1 :])
            return None
        has_python = has_python or name.startswith("python")
    return None


def find_last_value(words: Sequence[str], option: str) -> str | None:
    """Return the last value of an option among words, which counts for argparse, or None if it has none."""
    found = None
    for place, word in enumerate(words):
        if word == option and place + 1 < len(words):
            found = words[place + 1]
        elif word.startswith(f"{option}="):
            found = word.partition("=")[2]
    return found


def list_other_words(words: Sequence[str], option: str) -> list[str]:
    """Return the words without an option and its values, however often it is given."""
    return [
        word
        for place, word in enumerate(words)
        if word != option and not word.startswith(f"{option}=") and (place == 0 or words[place - 1] != option)
    ]


def _read_launcher(name: str, words: Sequence[str], where: str, program: str = "") -> LaunchLine | None:
    options: dict[str, str] = {}
    place = 0
    while place < len(words) and words[place].startswith("-"):
        option, equals, value = words[place].partition("=")
        key = option.lstrip("-").replace("_", "-")
        place += 1
        if key in ("m", "module"):
            options["m"] = ""
            continue
        if equals:
            options[key] = value
        elif key in _SINGLE or place >= len(words) or words[place].startswith("-") or words[place].endswith(".py"):
            options[key] = ""
        else:
            options[key] = words[place]
            place += 1
    if place >= len(words):
        if program:
            return None
        raise SpecError(where or "command", f"{name} names no program", "check where the command was cut off")
    nodes = _read_count(options, _NODES, where)
    per_node = _read_count(options, ("nproc-per-node", "num-gpus"), where)
    total = _read_count(options, ("num-processes",), where)
    known = {key: value for key, value in options.items() if UNKNOWN not in value}
    launcher = "torchrun" if name.startswith("torch") else name
    script = f"{program} {words[place]}" if program else words[place]
    computed = frozenset(options.keys() - known.keys())
    return LaunchLine(launcher, script, words[place + 1 :], nodes, per_node, total, known, computed)


def _read_count(options: Mapping[str, str], names: Sequence[str], where: str) -> int | None:
    for name in names:
        if (value := options.get(name)) is None or UNKNOWN in value or value in ("gpu", "auto"):
            continue
        # An elastic range, such as 1:4, starts with the least.
        text = value.partition(":")[0]
        if not (text.isdecimal() and 0 < int(text[:9]) <= 2**20 and len(text) <= 7):
            raise SpecError(
                f"{where}: --{name}" if where else f"--{name}", f"{value[:40]!r} is no count", "give a number"
            )
        return int(text)
    return None
