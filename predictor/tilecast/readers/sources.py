"""Read a launch from the words of a command, or from a file that contains one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tilecast.launch_options.options_table import UNKNOWN, Facts, OptionTable, Setting, spell_option
from tilecast.readers.command import (
    LaunchLine,
    add_allocation_counts,
    add_device_count,
    find_last_value,
    find_launch,
    list_other_words,
    read_command,
)
from tilecast.readers.documents import flatten, list_leaf_settings, load_mapping
from tilecast.readers.megatron import SCRIPTS as MEGATRON
from tilecast.readers.megatron import read_megatron
from tilecast.readers.python import find_functions, read_function, split_name
from tilecast.readers.reading import LaunchReading
from tilecast.readers.recipes import read_recipe
from tilecast.readers.shell import Script, read_script
from tilecast.readers.slurm import Allocation
from tilecast.readers.torchtitan import read_torchtitan
from tilecast.readers.torchtitan_models import define_model
from tilecast.spec import SpecError

_CONFIGURATIONS = (".yaml", ".yml", ".json", ".toml")
SHELL = (".sh", ".bash", ".sbatch", ".slurm")
"""Suffixes of shell scripts."""
MAX_BYTES = 2**20


class Folder:
    """Access to the files in the folder of the file that the user names.

    Files outside the folder are read only if the user's own command names them.
    """

    def __init__(self, root: Path, written: Mapping[str, str] | None = None, named: Sequence[str] = ()) -> None:
        self.root = root
        self.named = frozenset(named)
        self.written = {_normalize_file_name(name): text for name, text in (written or {}).items()}

    def read(self, name: str) -> str:
        """Return the text of a file in the folder, or of a file that the script writes.

        Raises:
            SpecError: the file does not exist, is outside the folder, is too long, or is not text.
        """
        if _normalize_file_name(name) in self.written:
            return self.written[_normalize_file_name(name)]
        if name in self.named:
            return read_bounded(Path(name), name)
        if UNKNOWN in name:
            problem = f"its name holds that of {name.split(UNKNOWN)[1][:60]}, which is not literal"
            raise SpecError(name.replace(UNKNOWN, "$")[:120], problem, "write its path")
        path = (self._resolved / name).resolve()
        if not path.is_relative_to(self._resolved):
            raise SpecError(name, "lies outside the folder of what was given", "copy it there")
        return read_bounded(path, name)

    @cached_property
    def _resolved(self) -> Path:
        return self.root.resolve()


class Files(Protocol):
    """Access to the files that a command may name."""

    def read(self, name: str) -> str:
        """Return the text of a file.

        Raises:
            SpecError: the file cannot be read.
        """


def _can_read(folder: Files, name: str) -> bool:
    """Return whether a file can be read."""
    try:
        folder.read(name)
    except SpecError:
        return False
    return True


def _normalize_file_name(name: str) -> str:
    return name.removeprefix("./")


def read_bounded(path: Path, name: str) -> str:
    """Return the text of a file that has at most `MAX_BYTES`.

    Raises:
        SpecError: the file cannot be read, is too long, or is not text.
    """
    try:
        # A pipe would be waited for without end.
        if path.exists() and not path.is_file():
            raise SpecError(name, "is no regular file", "give a script or a configuration")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SpecError(name, "cannot be read", str(error.strerror or error)) from None
    if len(data) > MAX_BYTES:
        raise SpecError(name, f"is longer than {MAX_BYTES // 2**20} MiB", "give the launch line behind --")
    if b"\0" in data:
        raise SpecError(name, "is binary", "give a script, a configuration, or the launch line behind --")
    try:
        # Editors put a byte order mark first.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SpecError(name, "is not UTF-8 text", "give a script or a configuration") from None


def read_words(
    words: Sequence[str], *, gpus: int | None = None, has_model: bool = False, folder: Path | None = None
) -> LaunchReading:
    """Return the training job and the plan that a command describes.

    Args:
        words: the words of the command, or the text of a shell script or a configuration alone.
        gpus: number of GPUs if the command does not say it, or None.
        has_model: whether the user names the model separately from the command.
        folder: folder of the files that the command names. None for the working directory.

    Raises:
        SpecError: the command launches nothing that can be read, or its options contradict each other.
    """
    words = list(words)
    if len(words) == 1 and "\n" in words[0]:
        if name := name_configuration(words[0]):
            return _read_configurations({name: words[0]}, Folder(folder or Path()), gpus, has_model)
        script = read_script(words[0], "")
        reading = read_line(_find_counted_launch(script), "", Folder(folder or Path(), script.files), gpus, has_model)
        return replace(reading, notes=(*reading.notes, *script.notes))
    line = read_command(words, "")
    if line is None:
        if len(words) == 1 and is_launch_file(words[0]):
            return read_file(words[0], gpus=gpus, has_model=has_model)
        if words and all(word.endswith(_CONFIGURATIONS) for word in words):
            texts = {word: read_bounded(Path(word), word) for word in words}
            return _read_configurations(texts, Folder(Path(words[0]).parent), gpus, has_model)
        shown = " ".join(words)[:60]
        raise SpecError("command", f"{shown!r} launches no training that is known", f"give {_KNOWN}")
    line = add_device_count(add_allocation_counts(line, Allocation(), ""), None, words)
    # The user typed these names: they are what was given.
    named = [part for word in words for part in (word, word.partition("=")[2]) if part.endswith(_CONFIGURATIONS)]
    return read_line(line, "", Folder(folder or Path(), named=named), gpus, has_model)


def _find_counted_launch(script: Script) -> LaunchLine:
    """Return the only launch line of a script, with the GPUs that its devices say.

    Raises:
        SpecError: the script has no launch line, or several different ones.
    """
    line = find_launch(script)
    program = line.program.rpartition(" ")[2]
    return add_device_count(line, script, next((words for words in script.commands if program in words), []))


_KNOWN = "a torchrun, accelerate, deepspeed or python command with a training script"


_KEYS = (
    "base_model", "micro_batch_size", "per_device_train_batch_size", "zero_optimization", "train_batch_size",
    "train_micro_batch_size_per_gpu", "compute_environment", "distributed_type", "_component_", "per_device_batch_size",
    "finetuning_type", "MODEL_ARGS", "tensor_model_parallel_size", "model_name_or_path", "trainer", "checkpoint_dir",
)  # fmt: skip
"""Keys of which a launcher's configuration has at least one."""
_SIGNS = re.compile(rf'(?:^|[{{,\s])["\']?(?:{"|".join(_KEYS)})["\']?\s*:')
_OTHERS = re.compile(r'(?:^|[{,\s])["\']?(?:apiVersion|architectures|base_model_name_or_path)["\']?\s*:')


_TOML = re.compile(r"\[\[?[\w.\"-]+\]\]?\s*(#.*)?$|[\w.\"-]+\s+=\s+\S")
_YAML = re.compile(r"---\s*$|[\w-]+:(\s|$)")


def name_configuration(text: str) -> str:
    """Return a file name for the text of a TOML or YAML configuration, or an empty string for a shell script."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    if _TOML.match(first):
        return "configuration.toml"
    is_yaml = _YAML.match(first) and _SIGNS.search(text) and not _OTHERS.search(text)
    return "configuration.yaml" if is_yaml else ""


_SINGLE_DEVICE = re.compile(r"^# *tune run (?:[a-z_]+_single_device\b)", re.MULTILINE)


def is_launch_file(name: str) -> bool:
    """Return whether a name is that of a shell script, a TOML file, or a configuration with the keys of a launcher.

    The result is also True for a Python file with functions that build a configuration, and for `FILE.py:FUNCTION`.
    """
    if name.endswith((*SHELL, ".toml")):
        return True
    file, function = split_name(name)
    if file.endswith(".py"):
        return bool(function) or bool(_find_recipes(file))
    if not name.endswith((".yaml", ".yml", ".json")):
        return False
    try:
        text = read_bounded(Path(name), name)
    except SpecError:
        return False
    return _SIGNS.search(text) is not None and _OTHERS.search(text) is None


_RETURNED = {"Trainer.Config": "torchtitan-0.3", "ConfigContainer": "megatron-bridge", "run.Partial": "nemo"}
"""Table of options by the return type of a Python function."""


def _find_recipes(name: str) -> dict[str, str]:
    """Return the names of the functions in a Python file that build a configuration, each with its table of options."""
    try:
        functions = find_functions(read_bounded(Path(name), name), name)
    except SpecError:
        return {}
    return {function: _RETURNED[kind] for function, kind in functions.items() if kind in _RETURNED}


def _find_package(path: Path) -> Path | None:
    """Return the folder of the outermost Python package that contains a file, or None if the file is in no package."""
    found = None
    for folder in path.resolve().parents:
        if not (folder / "__init__.py").is_file():
            break
        found = folder
    return found


_GPUS = re.compile(r"_(\d{1,5})gpu_")
"""Pattern of the number of GPUs in the name of a Megatron-Bridge recipe."""


def _read_python(
    name: str, function: str, folder: Files, gpus: int | None, has_model: bool, over: Sequence[Setting] = (),
    kind: str = "", beside: str = "", package: Path | None = None,
) -> LaunchReading:  # fmt: skip
    """Return the launch that a function of a Python file describes.

    Args:
        name: the file.
        function: name of the function, or an empty string if the file has only one.
        folder: the files that may be read.
        gpus: number of GPUs, or None if it is unknown.
        has_model: whether the user names the model separately from the file.
        over: options of the command line.
        kind: the table of options, or an empty string to find it by the function's return type.
        beside: path from `folder` to the folder of imported files, with a final slash.
        package: folder of the file's package, from which the file may import. None if it is in no package.

    Raises:
        SpecError: there is no such function, or its result cannot be read.
    """
    text = folder.read(name)
    functions = find_functions(text, name)
    known = {one: _RETURNED[returned] for one, returned in functions.items() if returned in _RETURNED}
    if not function:
        if len(known) != 1:
            shown = ", ".join([*list(known)[:3], *(["…"] if len(known) > 3 else [])]) or "none"
            problem = f"holds {len(known)} configurations ({shown})"
            raise SpecError(name, problem, f"name one: {name.rpartition('/')[2]}:FUNCTION")
        function = next(iter(known))
    table = kind or known.get(function)
    if table is None:
        raise SpecError(name, f"has no configuration {function[:60]!r}", f"known types: {', '.join(_RETURNED)}")
    where = f"{name}:{function}"
    options = OptionTable.read(table)
    place = () if package is None else Path(name).resolve().parent.relative_to(package).parts
    found = read_function(
        text, name, function, lambda one: folder.read(beside + one), options.facts.get("bases", {}),
        package.parts if package else (), place, options.facts.get("folders", ()),
        options.facts.get("neighbours", ()), options.facts.get("located", ()), options.facts.get("calls", {}),
    )  # fmt: skip
    # None leaves most options as they are, and switches some off.
    settings = [
        one
        for one in found
        if (one.values or "empty" in options.options.get(options.find_key(one.option), {}))
        and (one.values != (None,) or "bare" in options.options.get(spell_option(one.option), {}))
    ]
    settings += over
    if table == "torchtitan-0.3":
        # The folder of a registry is named after its model. A file elsewhere imports the model's registry.
        module = next((one.text for one in settings if one.option == "model_spec"), "").split(".")
        family = module[-2] if len(module) > 2 else Path(name).resolve().parent.name
        if not any(one.option in ("module", "--module") for one in settings):
            settings.append(Setting("module", (family,)))

        def define(flavor: str) -> dict[str, Any] | None:
            if package is None or len(module) < 3:
                return None
            site = beside.removesuffix(f"{package.name}/") + f"{module[0]}/"
            path = package.parent / module[0]
            if not _can_read(folder, f"{site}{'/'.join(module[1:-1])}/__init__.py"):
                return None
            return define_model(flavor, module[1:-1], lambda one: folder.read(site + one), path.parts)

        return read_torchtitan(settings, where, gpus, has_model, table, define)
    if gpus_in_name := _GPUS.search(function):
        gpus = int(gpus_in_name[1])
    return read_megatron(settings, where, "pretrain_gpt.py", gpus, has_model, table)


def list_configurations(name: str) -> list[tuple[str, str]]:
    """Return the launcher and the name of each training configuration in a file. Most files have at most one.

    Raises:
        SpecError: the file cannot be read.
    """
    if name.endswith(SHELL):
        script = read_script(read_bounded(Path(name), name), name)
        lines = [line for words in script.commands if (line := read_command(words, script.name)) is not None]
        return [(table, name)] if lines and (table := _find_reader(lines[0])) else []
    if not is_launch_file(name):
        return []
    if name.endswith(".py"):
        return [(table, f"{name}:{function}") for function, table in _find_recipes(name).items()]
    values = load_mapping(read_bounded(Path(name), name), name)
    table = detect_option_table(values)
    # Other configurations of the launcher generate, evaluate or convert.
    trains = OptionTable.read(table).facts.get("trains", {}).get("keys") if table in _TABLES else None
    return [(table, name)] if table and (trains is None or set(trains) & set(values)) else []


def detect_option_table(values: Mapping[str, Any]) -> str:
    """Return the name of the table of options to which the keys of a configuration belong, or "" if there is none."""
    names = set(map(str, values))
    for table, signs in _DETECTED:
        if any(one <= names for one in signs):
            return table
    component = values.get("model")
    if isinstance(component, Mapping) and "torchtune" in str(component.get("_component_", "")):
        return "torchtune"
    degrees = {"tensor_model_parallel_size", "pipeline_model_parallel_size"}
    if isinstance(component, Mapping) and degrees & set(component):
        return "nemo" if "trainer" in names else "megatron-bridge"
    if isinstance(values.get("model_parallel"), Mapping) and "language_model" in names:
        return "megatron-yaml"
    inner = values.get("trainer")
    if isinstance(inner, Mapping) and inner.keys() & {"devices", "strategy", "precision", "num_nodes"}:
        return "lightning"
    if isinstance(values.get("train"), Mapping) and names & {"checkpoint_dir", "model_name"} and "precision" in names:
        return "lightning"
    return ""


_TABLES = ("torchtune", "llamafactory", "maxtext")
"""Tables of options that can describe a configuration for training."""
_DETECTED: Sequence[tuple[str, Sequence[set[str]]]] = (
    ("llamafactory-1", ({"model", "train_dataset"},)),
    ("axolotl", ({"base_model"}, {"micro_batch_size", "sequence_len"})),
    ("accelerate", ({"compute_environment"}, {"distributed_type"})),
    ("deepspeed", ({"zero_optimization"}, {"train_micro_batch_size_per_gpu"}, {"train_batch_size"})),
    ("llamafactory", ({"stage", "model_name_or_path"}, {"finetuning_type"}, {"cutoff_len"})),
    ("maxtext", ({"per_device_batch_size"}, {"base_emb_dim"}, {"ici_fsdp_parallelism"})),
    ("megatron-arguments", ({"MODEL_ARGS"},)),
    ("megatron", ({"tensor_model_parallel_size"}, {"tensor-model-parallel-size"})),
    ("torchtitan", ({"parallelism", "training"}, {"model", "training"}, {"activation_checkpoint"})),
    ("trl", ({"packing"}, {"max_length"}, {"completion_only_loss"}, {"assistant_only_loss"}, {"dataset_text_field"})),
    ("trainer", ({"per_device_train_batch_size"}, {"model_name_or_path"})),
)


def _read_configurations(
    texts: Mapping[str, str], folder: Files, gpus: int | None, has_model: bool, words: Sequence[str] = (),
    table: str = "", line: LaunchLine | None = None,
) -> LaunchReading:  # fmt: skip
    """Return the launch that several configurations describe together. Options on the command line take precedence.

    Raises:
        SpecError: none of the configurations belongs to a known launcher.
    """
    kinds: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, text in texts.items():
        values = load_mapping(text, name)
        kind = table if table and not kinds else detect_option_table(values)
        if not kind:
            shown = ", ".join(map(str, list(values)[:3]))
            raise SpecError(name, f"is of no launcher that is known (its keys: {shown[:60]})", f"give {_KNOWN}")
        kinds.setdefault(kind, (name, values))
    beside = [kind for kind in kinds if kind in ("accelerate", "deepspeed")]
    main = next((kind for kind in kinds if kind not in beside), None) or beside[-1]
    where, values = kinds[main]
    if main == "megatron-arguments":
        return read_megatron(_list_megatron_arguments(values), where, "pretrain_gpt.py", gpus, has_model)
    over = _parse_overrides(words)
    if main in ("megatron", "megatron-yaml", "megatron-bridge", "nemo"):
        settings = [*_resolve_references(flatten(values)), *over]
        settings = [one for one in settings if one.values != (None,)] if main != "megatron" else settings
        return read_megatron(settings, where, "pretrain_gpt.py", gpus, has_model, main)
    if main == "torchtitan":
        return read_torchtitan([*flatten(values), *over], where, gpus, has_model)
    extra = [_read_facts(kind, *kinds[kind]) for kind in beside if kind != main]
    settings = list_leaf_settings(values) if main == "accelerate" else [*flatten(values), *over]
    if main == "deepspeed":
        settings = [one for one in settings if one.text.lower() != "auto" and one.values != (None,)]
    per_node = line.gpus_per_node if line else None
    return read_recipe(
        main, settings, where, folder.read, gpus, [*extra, *_read_launcher_facts(line, folder)], per_node
    )


_REFERENCE = re.compile(r"\$\{([.\w]+)\}")


def _resolve_references(settings: Sequence[Setting]) -> list[Setting]:
    """Return settings in which a value that is a reference, such as `${.seq_length}`, is replaced by its target's.

    A reference is followed once. If its target is missing or contains a reference itself, the setting is left out.
    """
    known = {setting.option: setting for setting in settings}
    found = []
    for setting in settings:
        match = _REFERENCE.fullmatch(setting.text)
        if match is None:
            found.append(setting)
            continue
        name = match[1]
        if name.startswith("."):
            name = f"{setting.option.rpartition('.')[0]}{name}".lstrip(".")
        target = known.get(name)
        if target is not None and not _REFERENCE.search(target.text):
            found.append(Setting(setting.option, target.values))
    return found


def _read_facts(kind: str, name: str, values: Mapping[str, Any]) -> Facts:
    settings = list_leaf_settings(values) if kind == "accelerate" else flatten(values)
    settings = [one for one in settings if one.text.lower() != "auto" and one.values != (None,)]
    return OptionTable.read(kind).read_facts(settings, name)


def _read_launcher_facts(line: LaunchLine | None, folder: Files) -> list[Facts]:
    """Return the facts of `accelerate launch`, or the defaults of LitGPT's subcommand, or []."""
    if line is not None and line.program.startswith("litgpt "):
        return [_read_litgpt(line.program, line.arguments, "").defaults]
    if line is None or line.launcher != "accelerate":
        return []
    settings = [Setting(f"--{key}", (value,) if value else ()) for key, value in line.options.items()]
    facts = [OptionTable.read("accelerate").read_facts(settings, "accelerate launch")]
    if path := line.options.get("config-file"):
        facts.append(_read_facts("accelerate", path, load_mapping(folder.read(path), path)))
    return facts


def _parse_overrides(words: Sequence[str]) -> list[Setting]:
    """Return settings from words such as `--training.steps 10`, `--training.steps=10` or `steps=10`."""
    settings: list[Setting] = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals:
            settings.append(Setting(key, (value,)))
        elif word.startswith("--"):
            settings.append(Setting(word, ()))
        elif settings and not settings[-1].values:
            settings[-1] = Setting(settings[-1].option, (word,))
    return settings


def _list_megatron_arguments(values: Mapping[str, Any]) -> list[Setting]:
    """Return settings for the options in a mapping MODEL_ARGS. A flag in it has the value true."""
    stated = values["MODEL_ARGS"]
    if not isinstance(stated, Mapping):
        raise SpecError("MODEL_ARGS", "is no mapping", "give options with their values")
    return [Setting(str(key), () if value is True else (value,)) for key, value in stated.items() if value is not False]


def read_file(name: str, *, gpus: int | None = None, has_model: bool = False) -> LaunchReading:
    """Return the launch in a shell script or a configuration. For the arguments see `read_words`.

    Raises:
        SpecError: the file cannot be read, or describes no job.
    """
    file, function = split_name(name)
    path = Path(file)
    if file.endswith(".py"):
        package = _find_package(path)
        # A package beside its own may define what it imports.
        folder = Folder(package.parent if package else path.parent, named=[file])
        beside = f"{package.name}/" if package else ""
        return _read_python(file, function, folder, gpus, has_model, beside=beside, package=package)
    text = read_bounded(path, name)
    if not name.endswith(SHELL) and not text.startswith("#!"):
        # torchtune says in a comment that a recipe runs on one GPU.
        gpus = 1 if _SINGLE_DEVICE.search(text) else gpus
        return _read_configurations({name: text}, Folder(path.parent), gpus, has_model)
    script = read_script(text, name)
    line = _find_counted_launch(script)
    reading = read_line(line, name, Folder(path.parent, script.files), gpus, has_model)
    return replace(reading, notes=(*reading.notes, *script.notes))


def read_line(line: LaunchLine, where: str, folder: Files, gpus: int | None, has_model: bool) -> LaunchReading:
    """Return the launch that a launch line describes.

    Args:
        line: the launch line.
        where: name of its source in errors.
        folder: the files that it may name.
        gpus: number of GPUs if the line does not say it, or None.
        has_model: whether the user names the model separately.

    Raises:
        SpecError: the line launches nothing that can be read, or its options contradict each other.
    """
    world = line.world or gpus
    words, options = (
        line.arguments,
        {spell_option(word.partition("=")[0]) for word in line.arguments if word[:2] == "--"},
    )
    table = _find_table(line, options)
    method = ["--trl_method", _find_trl_method(line.program, where)] if table == "trl" else []
    litgpt = _read_litgpt(line.program, words, where) if line.program.startswith("litgpt ") else None
    if litgpt is not None:
        words = litgpt.words
    if line.program.rpartition("/")[2] in MEGATRON or _is_megatron(line):
        settings = OptionTable.read("megatron").split_words(words)
        reading = read_megatron(settings, where, line.program, world, has_model)
    elif table == "torchtitan":
        path = find_last_value(words, "--job.config_file") or find_last_value(words, "--job.config-file")
        module, function = find_last_value(words, "--module"), find_last_value(words, "--config")
        if path is None and module and function:
            return _read_registry(module, function, words, folder, world, has_model)
        if path is None:
            raise SpecError(where or "command", "names no --job.config_file", "give it")
        reading = _read_configurations(
            {path: folder.read(path)}, folder, world, has_model, [w for w in words if w != path], table, line
        )
    elif table in ("axolotl", "llamafactory", "torchtune", "maxtext", "trl", "lightning") and (
        path := find_last_value(words, "--config") or _find_configuration(words, table)
    ):
        over = [*(word for word in list_other_words(words, "--config") if word != path), *method]
        # MaxText's base.yml holds its defaults, which the table has.
        is_default = table == "maxtext" and path.rpartition("/")[2] == "base.yml" and not _can_read(folder, path)
        text = "run_name: ''" if is_default else _read_recipe_text(folder, path, table)
        reading = _read_configurations({path: text}, folder, world, has_model, over, table, line)
    elif table:
        settings = OptionTable.read(table).split_words([*words, *method])
        extra = [*_read_launcher_facts(line, folder), *_read_script_facts(line, settings, table)]
        reading = read_recipe(table, settings, where, folder.read, world, extra, line.gpus_per_node)
    else:
        remedy = "give its configuration file, or describe the job by flags"
        raise SpecError(where or "command", f"{line.program[:60]} is no training script that is known", remedy)
    if table == "trainer" and (reason := _find_script_refusal(line)):
        reading = replace(reading, unpriced={line.program: reason, **reading.unpriced})
    if table == "trainer" and not options & _TRAINER_OPTIONS and "plan.micro_batch" not in reading.origins:
        note = f"The micro-batch of {reading.plan.micro_batch} is Trainer's default: that of the script is not known."
        reading = replace(reading, notes=(*reading.notes, note))
    return replace(reading, gpus_per_node=line.gpus_per_node, program=line.program, words=tuple(words))


def _read_script_facts(line: LaunchLine, settings: Sequence[Setting], table: str) -> list[Facts]:
    """Return what a known script of Trainer adapts by `--use_lora`, or []."""
    if not _is_switched_on(settings, "use-lora"):
        return []
    options = OptionTable.read(table)
    model = next((one.text for one in settings if spell_option(one.option) == "model-name-or-path"), "").lower()
    for row in options.facts.get("adapters", ()):
        if line.program.rpartition("/")[2] == row["script"] and row["model"] in model:
            defaults = [Setting(option, (value,)) for option, value in row["options"].items()]
            # The first Qwen's script trains embedding and head of base models too.
            if re.search(r"qwen-\d", model) and "chat" not in model and not _is_switched_on(settings, "q-lora"):
                defaults.append(Setting("--lora_modules_to_save", ("embed_tokens", "lm_head")))
            return [options.read_facts(defaults, line.program)]
    return []


def _is_switched_on(settings: Sequence[Setting], option: str) -> bool:
    """Return whether an option is given and its last value is not `false`."""
    values = [one.text.lower() for one in settings if spell_option(one.option) == option]
    return bool(values) and values[-1] != "false"


def _find_script_refusal(line: LaunchLine) -> str:
    """Return why a script with options of Trainer trains something else than Trainer alone would, or ""."""
    named = set(re.split(r"[\W_]+", line.program.rpartition("/")[2]))
    if named & _UNSUPERVISED:
        return "learning from preferences or rewards is not priced"
    is_classifier = "classification" in named and "image" not in named
    has_own_head = is_classifier or (named & _OTHER_HEADS and "seq2seq" not in named)
    return "a head of its own on the language model is not priced" if has_own_head else ""


_OTHER_HEADS = frozenset(("glue", "xnli", "squad", "qa", "ner", "swag"))
"""Words in the names of Transformers' example scripts that replace the model's head."""
_TRAINER_OPTIONS = frozenset(("per-device-train-batch-size", "model-name-or-path", "deepspeed", "deepspeed-config"))
"""Options that only scripts of Trainer, and of Accelerate's examples, have."""


def _find_configuration(words: Sequence[str], table: str) -> str | None:
    """Return the file of a recipe that is a word of its own, or None.

    A file behind an option is the option's value, such as `--deepspeed ds.json` or `--data.json_path train.json`.
    """
    files = [
        place
        for place, word in enumerate(words)
        if word.endswith(_CONFIGURATIONS) and word[0] != "-" and "=" not in word
    ]
    own = [place for place in files if place == 0 or words[place - 1][:1] != "-" or "=" in words[place - 1]]
    # Flags without values may stand before axolotl's file.
    own += [place for place in files if table == "axolotl" and words[place].endswith((".yaml", ".yml"))]
    return words[own[0]] if own else None


@dataclass(frozen=True, slots=True)
class _LitGptCommand:
    """A command of LitGPT: its words with the model as an option, and what its subcommand sets by default."""

    words: Sequence[str]
    defaults: Facts


def _read_litgpt(program: str, words: Sequence[str], where: str) -> _LitGptCommand:
    """Return a command of LitGPT, whose model may be its first word and whose method is its subcommand.

    Raises:
        SpecError: the method is not priced.
    """
    table = OptionTable.read("lightning")
    methods: Mapping[str, Mapping[str, Any]] = table.facts["litgpt"]
    method, rest = program.partition(" ")[2].removeprefix("finetune_"), list(words)
    if method == "finetune":
        # Until version 0.4 the method was a word of its own. Since then `finetune` alone is LoRA.
        method = rest.pop(0) if rest and re.fullmatch(r"(q?lora|full|adapter(_v2)?)", rest[0]) else "lora"
    if method not in methods:
        raise SpecError(where or program, f"LitGPT's {method} is not priced", "give lora, qlora, full or pretrain")
    if rest and not rest[0].startswith("-"):
        rest[:1] = ["--model_name" if method == "pretrain" else "--checkpoint_dir", rest[0]]
    defaults = [Setting(option, (value,)) for option, value in methods[method].items()]
    return _LitGptCommand(rest, table.read_facts(defaults, program))


def _read_recipe_text(folder: Files, path: str, table: str) -> str:
    """Return the text of a recipe.

    Raises:
        SpecError: it cannot be read. The remedy for a recipe that is only in torchtune's package is to copy it.
    """
    if table != "torchtune" or path.endswith(_CONFIGURATIONS) or _can_read(folder, path):
        return folder.read(path)
    remedy = f"copy it by 'tune cp {path[:80]} recipe.yaml', and give --config recipe.yaml"
    raise SpecError(path[:120], "is a recipe inside torchtune's package, which is not read", remedy)


_UNSUPERVISED = frozenset((
    "dpo", "orpo", "kto", "cpo", "simpo", "bco", "xpo", "ppo", "grpo", "gspo", "dapo", "rloo", "gkd", "prm", "reward",
    "rlhf", "distill", "distillation",
))  # fmt: skip
"""Words in the names of scripts that run further models, or train on pairs of answers."""
_REGISTRIES = ("torchtitan/models/{}/config_registry.py", "torchtitan/experiments/{}/config_registry.py")
"""Files of torchtitan 0.3 that may define the function that `--config` names, for a `--module`."""


def _read_registry(
    module: str, function: str, words: Sequence[str], folder: Files, gpus: int | None, has_model: bool
) -> LaunchReading:
    """Return the launch of a torchtitan 0.3 command, whose configuration is a function in the folder.

    Raises:
        SpecError: the folder has no such function.
    """
    paths = [form.format(module) for form in _REGISTRIES] if re.fullmatch(r"\w+", module) else []
    paths += [f"{module.replace('.', '/')}/config_registry.py", f"{module.replace('.', '/')}.py"]
    for path in paths:
        if not _can_read(folder, path):
            continue
        over = [one for one in _parse_overrides(words) if spell_option(one.option) not in ("module", "config")]
        return _read_python(path, function, folder, gpus, has_model, over, "torchtitan-0.3", f"{Path(path).parent}/")
    remedy = f"run it where {paths[0]} is, or give that file as FILE.py:{function}"
    raise SpecError(f"--module {module[:60]}", "its config_registry.py is not in this folder", remedy)


def _find_reader(line: LaunchLine) -> str:
    """Return the name of the option table for a launch line, or "" if no table fits. Megatron-LM is included."""
    if line.program.rpartition("/")[2] in MEGATRON or _is_megatron(line):
        return "megatron"
    return _find_table(line, {spell_option(word.partition("=")[0]) for word in line.arguments if word[:2] == "--"})


def _find_table(line: LaunchLine, options: set[str]) -> str:
    """Return the name of the option table for a launch line, or "" if no table fits. Megatron-LM is not included."""
    for name, table in _PROGRAMS:
        if name in line.program:
            return table
    if "job.config-file" in options or {"module", "config"} <= options:
        return "torchtitan"
    if "config" in options and "fit" in line.arguments[:1]:
        return "lightning"
    if options & {"finetuning-type", "stage", "cutoff-len"} and "model-name-or-path" in options:
        return "llamafactory"
    if options & _TRAINER_OPTIONS:
        return "trainer"
    return "trainer" if line.launcher == "accelerate" else ""


_TRL_METHODS: Mapping[str, str] = {
    **{name: name for name in ("sft", "dpo", "kto", "orpo", "cpo", "reward")}, "reward_modeling": "reward",
}  # fmt: skip
"""Method of TRL for the name of a subcommand or script."""
_TRL_GENERATES = ("grpo", "rloo", "ppo", "online_dpo", "nash_md", "xpo", "gkd", "distillation", "prm", "bco")
"""Subcommands and scripts of TRL that are not read: most of them generate text during training."""


def _find_trl_method(program: str, where: str) -> str:
    """Return the method of TRL that a program trains with, such as `dpo`. A program of another name is taken as `sft`.

    Raises:
        SpecError: the method is not priced.
    """
    name = re.split(r"[ /.]", program.removesuffix(".py"))[-1]
    if name not in _TRL_GENERATES and name not in _TRL_METHODS:
        # A script of one's own, such as run_dpo.py.
        name = re.split(r"[_-]", name)[-1]
    if name in _TRL_GENERATES:
        problem = f"TRL's {name} is not priced"
        raise SpecError(where or program[:60], problem, f"give one of {', '.join(_TRL_METHODS)}")
    return _TRL_METHODS.get(name, "sft")


_PROGRAMS = (
    ("litgpt", "lightning"),
    ("torchtitan", "torchtitan"), ("axolotl", "axolotl"), ("llamafactory", "llamafactory"), ("torchtune", "torchtune"),
    ("trl ", "trl"), ("trl/", "trl"), ("trl.", "trl"), ("sft.py", "trl"),
    ("dpo.py", "trl"), ("kto.py", "trl"), ("orpo.py", "trl"), ("cpo.py", "trl"), ("reward_modeling.py", "trl"),
    ("grpo.py", "trl"), ("MaxText", "maxtext"),
    ("maxtext", "maxtext"),
)  # fmt: skip
"""Parts of programs' names, and the table of options for each."""


def _is_megatron(line: LaunchLine) -> bool:
    words = set(line.arguments)
    return "--tensor-model-parallel-size" in words or {"--micro-batch-size", "--num-layers"} <= words
