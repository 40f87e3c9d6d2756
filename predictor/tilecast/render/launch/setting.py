"""Input and output of launch writers: a plan on nodes, and a command with files and script lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tilecast import frameworks, untrusted
from tilecast.advice import Advice, Offer
from tilecast.frameworks import Framework
from tilecast.model import Model
from tilecast.spec import Plan, Workload
from tilecast.zoo import Transformer

SCRIPT = "train.py"
"""Name of the user's training script in commands."""
PORT = 29500
"""Rendezvous port, the default of torchrun."""
_WIDTH = 98


@dataclass(frozen=True, slots=True)
class LaunchSetting:
    """A plan of a job on the nodes of a pool, with the forecast step time and memory."""

    name: str
    workload: Workload
    plan: Plan
    pool: str
    nodes: int
    gpus_per_node: int
    step_s: float
    memory_bytes: tuple[float, float, float] | None = None
    """Lower and upper forecast of the bytes that a GPU uses, and the bytes available. None if unknown."""
    shared_nodes: str = ""
    """Sentence on groups of GPUs that share a node (`Offer.shared_nodes`)."""

    @classmethod
    def from_offer(cls, name: str, offer: Offer) -> LaunchSetting:
        """Return the launch setting of an offer. `name` is the name of the job."""
        return cls(
            name=name,
            workload=offer.workload,
            plan=offer.plan,
            pool=offer.pool.name,
            nodes=offer.nodes,
            gpus_per_node=offer.gpus_per_node,
            step_s=offer.step_s,
            memory_bytes=(offer.memory_lower_bytes, offer.memory_upper_bytes, offer.memory_available_bytes),
            shared_nodes=offer.shared_nodes,
        )

    @property
    def label(self) -> str:
        """Name of the job with only those characters that are safe in file paths and in command-line options."""
        return re.sub(r"[^\w.-]+", "-", self.name).strip("-.")[:63] or "job"

    @property
    def is_tight(self) -> bool:
        """Whether the upper end of the memory forecast exceeds the available bytes."""
        return self.memory_bytes is not None and self.memory_bytes[1] > self.memory_bytes[2]

    @property
    def model(self) -> Model:
        """Model that the job trains."""
        return self.workload.model

    @property
    def shard_degree(self) -> int:
        """Number of data-parallel ranks over which ZeRO shards a job's states. Without ZeRO, it is 1."""
        data = self.plan.data
        return 1 if self.plan.zero_stage == 0 else min(self.workload.shard_degree or data, data)

    @property
    def framework(self) -> Framework:
        """Properties of the job's framework, from `frameworks.toml`."""
        return frameworks.find_framework(self.workload)

    @property
    def transformer(self) -> Transformer:
        """Transformer dimensions of the model. For other models, the defaults, such as no experts."""
        own = self.model.dimensions
        return own if isinstance(own, Transformer) else Transformer()


def list_launch_settings(advice: Advice, best: Offer) -> tuple[LaunchSetting, LaunchSetting | None]:
    """Return the launch setting of the recommended offer, and the setting of a plan with memory to spare.

    The second setting is None unless the memory of the recommended offer is tight.
    """
    name, safer = advice.request.name, advice.safer
    is_beside = safer is not None and best.is_tight and safer.pool.name == best.pool.name
    return LaunchSetting.from_offer(name, best), LaunchSetting.from_offer(name, safer) if safer and is_beside else None


@dataclass(frozen=True, slots=True)
class OwnCommand:
    """The command by which the user launches the job at present."""

    table: str
    """Name of the table of options by which it was read."""
    program: str = ""
    """The training script. Empty if a configuration was read."""
    words: Sequence[str] = ()
    """Arguments of the training script."""


@dataclass(frozen=True, slots=True)
class LaunchScript:
    """The command that launches a plan on every node, with configuration files and training-script lines."""

    command: Sequence[str]
    """Arguments of the command. `$NAME` in an argument is a shell variable."""
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Content of each configuration file by its name."""
    script: Sequence[str] = ()
    """Python lines for the training script."""
    notes: Sequence[str] = ()
    """Remarks for the reader, printed as comments."""
    program: str = SCRIPT
    """Training script to which the lines of `script` belong."""

    def text(self, head: Sequence[str]) -> str:
        """Return environment, command, files and script lines as text, after comments with `head` and the notes."""
        lines = [_write_comment(line) for line in (*head, *self.notes)]
        lines += [*self._list_exports(), *_wrap_command(self.command)]
        for name, content in self.files.items():
            lines += ["", f"# {name}", content.rstrip("\n")]
        if self.script:
            lines += ["", f"# in {self.program}", *self.script]
        return "\n".join(lines) + "\n"

    def with_program(self, program: Sequence[str]) -> LaunchScript:
        """Return the launch with `train.py` replaced by a program and its arguments.

        Arguments that the launcher adds come after the program's own, so that they take precedence. Without a program,
        or if the command has no `train.py`, return the launch unchanged.
        """
        if not program or SCRIPT not in self.command:
            return self
        place = list(self.command).index(SCRIPT)
        return replace(self, command=[*self.command[:place], *program, *self.command[place + 1 :]])

    def with_own_options(self, program: str, options: Sequence[Sequence[str]]) -> LaunchScript:
        """Return the launch with the user's script in place of the launcher's, and the user's options after the script.

        Each option is a list of its words. If both the user and the launcher set an option, the launcher's value takes
        precedence, because it comes last. The option for the output directory keeps the user's value.
        """
        place = next((place for place, word in enumerate(self.command) if is_script_name(word)), None)
        if place is None:
            return self
        rest = list(self.command[place + 1 :])
        if "--output_dir" in rest and any(one[0].partition("=")[0] == "--output_dir" for one in options):
            start = rest.index("--output_dir")
            del rest[start : start + 2]
        words = [word for option in options for word in option]
        return replace(self, command=[*self.command[:place], program, *words, *rest], program=program)

    def format_bash_script(self) -> str:
        """Return a bash script that writes the configuration files and then executes the command."""
        lines = self._list_exports()
        for name, content in self.files.items():
            lines += [f"cat > {name} <<'END'", content.rstrip("\n"), "END"]
        command = _wrap_command(self.command)
        return "\n".join([*lines, f"exec {command[0]}", *command[1:]]) + "\n"

    def document(self) -> dict[str, object]:
        """Return the launch as JSON-compatible data. Empty entries are left out."""
        document = {
            "environment": dict(self.environment),
            "command": list(self.command),
            "files": dict(self.files),
            "script": list(self.script),
            "notes": list(self.notes),
        }
        return {key: value for key, value in document.items() if value}

    def _list_exports(self) -> list[str]:
        return [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]


Values: TypeAlias = Mapping[str, Callable[[LaunchSetting], object]]
"""Functions that return the values of a launcher's options, by name in its table."""


def torchrun_command(setting: LaunchSetting, *program: str) -> list[str]:
    """Return a `torchrun` command that starts `program`. Every node runs the same command."""
    processes = f"--nproc-per-node={setting.gpus_per_node}"
    if setting.nodes == 1:
        return ["torchrun", "--standalone", processes, *program]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=$MASTER_ADDR:{PORT}", f"--rdzv-id={setting.label}"]
    return ["torchrun", f"--nnodes={setting.nodes}", processes, *meeting, *program]


def matmul_environment(workload: Workload) -> dict[str, str]:
    """Return environment variables that select FP32 or TF32 matrix products, or none for other precisions.

    NVIDIA's libraries read NVIDIA_TF32_OVERRIDE. PyTorch reads TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    (aten/src/ATen/Context.cpp).
    """
    variables = {"fp32": {"NVIDIA_TF32_OVERRIDE": "0"}, "tf32": {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}}
    return variables.get(workload.precision, {})


def allocator_environment(setting: LaunchSetting) -> dict[str, str]:
    """Return the environment variable that turns on expandable segments of PyTorch's allocator, or {} if unused."""
    expandable = setting.framework.allocator == "expandable"
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if expandable else {}


def _wrap_command(words: Sequence[str]) -> list[str]:
    """Return a command as lines of about 100 characters, joined by backslashes.

    An option stays on a line with its value.
    """
    pieces: list[str] = []
    for word in words:
        takes = pieces and pieces[-1].startswith("-") and "=" not in pieces[-1] and " " not in pieces[-1]
        if takes and not word.startswith("-"):
            pieces[-1] += f" {_quote_word(word)}"
        else:
            pieces.append(_quote_word(word))
    lines = [pieces[0]]
    for piece in pieces[1:]:
        if len(lines[-1]) + len(piece) < _WIDTH:
            lines[-1] += f" {piece}"
        else:
            lines.append(f"  {piece}")
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


_VARIABLE = re.compile(r"(\$(?:[A-Za-z_]\w*|\{\w+\}))", re.ASCII)


def _quote_word(word: str) -> str:
    """Return an argument quoted for a shell. Only its shell variables are expanded, and no other part of it is code."""
    option, equals, value = word.partition("=")
    if "$" in option or not equals:
        option, value = "", word
    parts = _VARIABLE.split(value)
    if len(parts) == 1:
        return shlex.quote(word)
    if re.search(r"[\"`$\\!]", "".join(parts[::2])):
        quoted = [f'"{part}"' if place % 2 else shlex.quote(part) for place, part in enumerate(parts) if part]
    else:
        quoted = [f'"{value}"']
    return (shlex.quote(f"{option}=") if option else "") + "".join(quoted)


def _write_comment(line: str) -> str:
    """Return a line as a shell comment. Characters that are not printable, such as line ends, become spaces."""
    return "# " + untrusted.blank_unprintable(line)


def is_script_name(word: str) -> bool:
    """Return whether an argument is the name of a Python script rather than an option."""
    return word.endswith(".py") and not word.startswith("-")
