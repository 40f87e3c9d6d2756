"""Read a launch from the words of a command, or from a file that holds one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tilecast.readers.command import LaunchLine, find_launch, read_command
from tilecast.readers.megatron import SCRIPTS as MEGATRON
from tilecast.readers.megatron import read_megatron
from tilecast.readers.options_table import OptionTable
from tilecast.readers.reading import LaunchReading
from tilecast.readers.shell import read_script
from tilecast.spec import SpecError

SHELL = (".sh", ".bash", ".sbatch", ".slurm")
"""Endings of the names of shell scripts."""
MAX_BYTES = 2**20


class Folder:
    """Files beside the one that the user names. Nothing outside is read."""

    def __init__(self, root: Path, written: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.written = {_clean(name): text for name, text in (written or {}).items()}

    def read(self, name: str) -> str:
        """Return the text of a file in the folder, or of one that the script writes.

        Raises:
            SpecError: there is no such file, it lies outside the folder, is too long or is no text.
        """
        if _clean(name) in self.written:
            return self.written[_clean(name)]
        root = self.root.resolve()
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise SpecError(name, "lies outside the folder of what was given", "copy it there")
        return read_bounded(path, name)


def _clean(name: str) -> str:
    return name.removeprefix("./")


def read_bounded(path: Path, name: str) -> str:
    """Return the text of a file of at most `MAX_BYTES`.

    Raises:
        SpecError: it cannot be read, is too long, or is no text.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SpecError(name, "cannot be read", str(error.strerror or error)) from None
    if len(data) > MAX_BYTES:
        raise SpecError(name, f"is longer than {MAX_BYTES // 2**20} MiB", "give the launch line behind --")
    if b"\0" in data:
        raise SpecError(name, "is binary", "give a script, a configuration, or the launch line behind --")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise SpecError(name, "is not UTF-8 text", "give a script or a configuration") from None


def read_words(
    words: Sequence[str], *, gpus: int | None = None, has_model: bool = False, folder: Path | None = None
) -> LaunchReading:
    """Return what a command says.

    Args:
        words: the words of the command.
        gpus: number of GPUs if the command does not say it, or None.
        has_model: whether the user names the model beside the command.
        folder: where the files that the command names lie; the working directory if None.

    Raises:
        SpecError: the command launches nothing that can be read, or its options contradict each other.
    """
    line = read_command(words, "")
    if line is None:
        if len(words) == 1 and is_launch_file(words[0]):
            return read_file(words[0], gpus=gpus, has_model=has_model)
        shown = " ".join(words)[:60]
        raise SpecError("command", f"{shown!r} launches no training that is known", f"give {_KNOWN}")
    return _read_line(line, "", Folder(folder or Path()), gpus, has_model)


_KNOWN = "a torchrun, accelerate, deepspeed or python command with a training script"


def is_launch_file(name: str) -> bool:
    """Return whether the name is that of a shell script or of a configuration that can only be a launcher's."""
    return name.endswith(SHELL)


def read_file(name: str, *, gpus: int | None = None, has_model: bool = False) -> LaunchReading:
    """Return what a shell script or a configuration says. Arguments are those of `read_words`.

    Raises:
        SpecError: the file cannot be read, or says no job.
    """
    path = Path(name)
    script = read_script(read_bounded(path, name), name)
    line = find_launch(script)
    return _read_line(line, name, Folder(path.parent, script.files), gpus, has_model)


def _read_line(line: LaunchLine, where: str, folder: Folder, gpus: int | None, has_model: bool) -> LaunchReading:
    world = line.world or gpus
    if line.program.rpartition("/")[2] in MEGATRON or _is_megatron(line):
        settings = OptionTable.read("megatron").split_words(line.arguments)
        reading = read_megatron(settings, where, line.program, world, has_model)
    else:
        remedy = "give its configuration file, or describe the job by flags"
        raise SpecError(where or "command", f"{line.program[:60]} is no training script that is known", remedy)
    return with_nodes(reading, line)


def with_nodes(reading: LaunchReading, line: LaunchLine) -> LaunchReading:
    """Return a reading with the GPUs of a node that the command starts processes on."""
    from dataclasses import replace

    return replace(reading, gpus_per_node=line.gpus_per_node)


def _is_megatron(line: LaunchLine) -> bool:
    words = set(line.arguments)
    return "--tensor-model-parallel-size" in words or {"--micro-batch-size", "--num-layers"} <= words
