"""Convert a launch command, a script or a launcher's configuration to a job, with the user's plan as its baseline."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tilecast import readers
from tilecast.advice import Baseline, Offer
from tilecast.hardware import Pool
from tilecast.inputs import hub
from tilecast.inputs.job_options import BARE_OPTIONS, JobOptions
from tilecast.inputs.measurements import UnresolvedRun
from tilecast.readers import LaunchReading
from tilecast.spec import PartialPlan, Plan, SpecError
from tilecast.zoo import huggingface

if TYPE_CHECKING:
    from tilecast.inputs.job import JobInput


def is_script(text: str) -> bool:
    """Return whether a text is a shell script, with several commands or variables, and not a single command."""
    return "\n" in text.strip().replace("\\\n", " ") or "$" in text


def split_command(text: str, field: str = "command") -> list[str]:
    """Return the words of a launch command. Lines may be continued by a backslash.

    A text with further lines or with variables is a shell script. Its text is returned as the only word.

    Raises:
        SpecError: a quotation is not closed, or the text ends in a backslash. The message names `field`.
    """
    if is_script(text):
        return [f"{text.strip()}\n"]
    try:
        return shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise SpecError(field, f"is no command: {str(error).lower()}", "paste the whole command") from None


def is_launch(options: JobOptions) -> bool:
    """Return whether the user gave a command, a script or a launcher's configuration."""
    return bool(options.command) or (isinstance(options.job, str) and readers.is_launch_file(options.job))


def read_launch_job(options: JobOptions, read_job_without_launch: Callable[[JobOptions], JobInput]) -> JobInput:
    """Return the job that a launch describes. Flags take precedence over the launch.

    Args:
        options: the command or the file, and values of flags.
        read_job_without_launch: function that reads the job of a model that the user names.

    Raises:
        SpecError: the launch cannot be read, or has options that change speed or memory and are not priced.
    """
    has_model = bool(options.command) and options.job is not None
    where = "" if options.command else str(options.job)
    if options.command:
        reading = readers.read_words(options.command, gpus=options.gpus, has_model=has_model)
    else:
        reading = readers.read_file(where, gpus=options.gpus)
    if not options.lenient:
        readers.require_priced(reading, where)
    said = dict(reading.training)
    values = dict(options.values)
    for name, option in BARE_OPTIONS.items():
        key = option.path.removeprefix("training.")
        if key in ("globalBatchSize", "sequenceLength") and key in said and name not in values:
            values[name] = said[key]
        if name in values:
            said.pop(key, None)
    plain = replace(options, values=values, command=())
    if "batch" not in values:
        remedy = "say on how many GPUs by --baseline POOL:N, or give the samples of one optimizer step"
        raise SpecError("--batch", "is missing, and the launch does not say it", remedy)
    if has_model:
        job = read_job_without_launch(plain)
    elif reading.model is None and reading.model_name:
        folder = Path() if options.command else Path(where).parent
        job = _read_model(reading.model_name, folder, replace(plain, command=options.command), read_job_without_launch)
    elif reading.model is None:
        raise SpecError("model", "is not said by the launch", "name it before --: tilecast advise MODEL -- …")
    else:
        job = _import_job_input().from_model(plain, reading.model_name, dict(reading.model))
    for key, value in {**said, "framework": said.get("framework", reading.framework)}.items():
        if not (key == "framework" and "framework" in values):
            origin = reading.origins.get(f"training.{key}", f"training.{key}")
            job = job.with_field(("training", key), value, origin)
    return replace(job, launch=reading)


def _import_job_input() -> type[JobInput]:
    from tilecast.inputs.job import JobInput

    return JobInput


def _read_model(
    name: str, folder: Path, options: JobOptions, read_job_without_launch: Callable[[JobOptions], JobInput]
) -> JobInput:
    """Return the job of the model that a launch names.

    Args:
        name: a path of a config.json or of its folder, a preset, or ORG/NAME on the Hugging Face Hub. Any other path is
            shortened to its last part, which is used as a name.
        folder: folder to which relative paths refer. A path outside it is shortened to its last part.
        options: the job's options.
        read_job_without_launch: function that reads the job of a model that the user names.

    Raises:
        SpecError: the name is none of these, or the config.json describes no model.
    """
    root = folder.resolve()
    if name.isprintable() and len(name) < 1024:
        stated = folder / name
        config = stated if stated.name == "config.json" else stated / "config.json"
        path = config.resolve()
        # What the user typed is what was given.
        is_typed = any(name in (word, word.partition("=")[2]) for word in options.command)
        if (is_typed or path.is_relative_to(root)) and path.is_file():
            if not huggingface.is_config(readers.load_mapping(readers.read_bounded(path, str(config)), str(config))):
                raise SpecError(str(config), "describes no model", "give a config.json of Transformers")
            return read_job_without_launch(replace(options, job=str(config), command=()))
    if (known := readers.find_preset_in_name(name)) is not None:
        return _import_job_input().from_model(options, known, {"preset": known})
    if not name.startswith(hub.PREFIX) and hub.is_hub_name(name):
        return read_job_without_launch(replace(options, job=name, command=()))
    problem = f"{name[:80]!r} is no preset, and no folder beside the launch with a config.json"
    raise SpecError("model", problem, "copy its config.json there, or name a preset or ORG/NAME of the Hub")


def find_baseline(reading: LaunchReading, pools: Sequence[Pool], stated: Baseline | None) -> Baseline | None:
    """Return the plan of a launch on a pool, as the baseline.

    Args:
        reading: the launch.
        pools: the pools that the user gave. A pool with nodes as large as those of the launch is preferred.
        stated: the user's own baseline, or None. Its pool and GPUs take precedence.
    """
    if stated is not None:
        plan = reading.plan if stated.plan is None else stated.plan
        return replace(stated, plan=_fit_data_degree(plan, stated.gpus))
    if not pools:
        return None
    gpus, pool, _ = _choose_pool(reading, pools)
    return Baseline(pool.name, gpus, _fit_data_degree(reading.plan, gpus))


def _choose_pool(reading: LaunchReading, pools: Sequence[Pool]) -> tuple[int, Pool, str]:
    """Return the number of GPUs of a launch, the pool of its baseline, and the reason for this pool."""
    gpus, each = reading.gpus or pools[0].max_gpus, reading.gpus_per_node
    large = [pool for pool in pools if pool.max_gpus >= gpus]
    alike = [pool for pool in large or pools if each in (None, pool.gpus_per_node)]
    pool = (alike or large or pools)[0]
    if not large:
        return gpus, pool, f"though no pool has {gpus} GPUs"
    nodes = f" in nodes of {each}" if alike and each is not None else ""
    return gpus, pool, f"the first pool with {gpus} GPUs{nodes}"


def explain_baseline(reading: LaunchReading, pools: Sequence[Pool]) -> str:
    """Return a sentence that says which of several pools has the baseline of a launch, and why.

    If there is only one pool, return an empty text.
    """
    if len(pools) < 2:
        return ""
    _, pool, why = _choose_pool(reading, pools)
    return f"Your baseline is priced on {pool.name}, {why}; --baseline POOL:N names another."


def add_launch_plan(runs: Sequence[UnresolvedRun], launched: Baseline) -> list[UnresolvedRun]:
    """Return measured runs. A run without a plan gets the plan of a launch that has as many GPUs as the run."""
    return [replace(run, plan=launched.plan) if run.plan is None and run.gpus == launched.gpus else run for run in runs]


def _fit_data_degree(plan: PartialPlan, gpus: int) -> PartialPlan:
    """Return a plan whose data-parallel degree makes it use all GPUs, if its other degrees divide their number."""
    shared = plan.tensor * plan.pipeline * plan.context
    return plan if gpus % shared else replace(plan, data=gpus // shared)


def describe_changes(reading: LaunchReading, before: Offer | None, after: Offer) -> str:
    """Return a sentence with the speed-up of another plan, and the options of the launch to change for it.

    Args:
        reading: the launch.
        before: the plan of the launch, or None if it does not run.
        after: another plan on the same GPUs.
    """
    if before is None:
        changes = readers.list_changes(reading, _complete_plan(reading), after.plan)
        return f"Your plan does not run on these GPUs, as its row says. Change: {'; '.join(changes)}."
    changes = readers.list_changes(reading, before.plan, after.plan)
    gain = before.step_s / after.step_s * after.workload.global_batch / before.workload.global_batch
    if not changes or gain < 1.01:
        return "No plan on the same GPUs is more than 1 % faster than yours."
    what = "this option" if len(changes) == 1 else f"these {len(changes)} options"
    return f"Change {what}: {gain:.2f}x as fast. {'; '.join(changes)}."


def _complete_plan(reading: LaunchReading) -> Plan:
    """Return the plan that a launch states. Columns that it leaves open get their defaults, which mean off."""
    plan, batch = reading.plan, reading.training.get("globalBatchSize")
    stated = {item.name: getattr(plan, item.name) for item in fields(plan)}
    complete = Plan(**{name: value for name, value in stated.items() if value is not None})
    ranks = complete.data * complete.micro_batch
    return complete if batch is None else replace(complete, gradient_accumulation=max(1, batch // ranks))
