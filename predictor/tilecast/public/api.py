"""The Python API: what `import tilecast` offers.

    import tilecast

    advice = tilecast.advise("llama-3.1-8b", seq=8192, batch=128, gpus="h100-sxm:16,l4:16")
    print(advice)
    print(advice.best.plan, advice.best.step_s)

Most functions return an immutable result that prints as the command line's table and has `rows` and `to_dict()`. They
raise `SpecError` for bad input. The module `advising` computes advice for this API and for the command line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from tilecast.inputs import pools as pool_inputs
from tilecast.inputs import queue as queue_inputs
from tilecast.inputs.job_options import JobOptions
from tilecast.inputs.launches import split_command
from tilecast.inputs.pools import PoolOptions
from tilecast.inputs.reading import InputWarning as InputWarning
from tilecast.planner.policies import POLICIES
from tilecast.public import catalog
from tilecast.public.advising import AdviceInputs, compute_advice
from tilecast.public.queueing import QueueInputs, plan_queue
from tilecast.public.results import Advice, Fits, Forecast, Queue, Sweep
from tilecast.public.results import PoolFit as PoolFit
from tilecast.public.results import Table as Table
from tilecast.public.sweeping import run_sweep
from tilecast.render.launch import LAUNCHERS
from tilecast.spec import SpecError
from tilecast.sweeps import SweepRange

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Unpack


class JobSettings(TypedDict, total=False):
    """Keyword arguments that describe how a job is trained and where it may run. All of them are optional.

    Names, values and meanings are those of the flags in `tilecast advise --help`. Numbers may be texts such as "8k" or
    "15T".
    """

    seq: int | str
    """Tokens per sample."""
    sequence_length: int | str
    """The same as `seq`."""
    batch: int | str
    """Samples per optimizer step, over all GPUs, or tokens as a text such as "4Mtokens"."""
    global_batch_size: int | str
    """The same as `batch`."""
    global_batch_size_range: Mapping[str, int] | str
    """Global batches that the job may be given instead: "256..1024", or {"min": 256, "max": 1024}."""
    micro_batch_size: int | str
    precision: str
    """bf16, fp16, fp32, tf32, fp8, mxfp8 or nvfp4."""
    allowed_precisions: Sequence[str] | str
    """Every precision that the job may be trained in."""
    framework: str
    """Framework that runs the plan."""
    framework_version: str
    """Version of the framework, such as "2.6" of PyTorch or "25.04" of NeMo."""
    optimizer: str
    weights: str
    """How 16-bit training holds weights: master, autocast, sharded or pure."""
    gradient_precision: str
    """fp32, bf16 or fp16."""
    moment_precision: str
    """fp32, bf16, fp16 or fp8."""
    fused_optimizer: bool
    fused_loss: bool
    """Whether softmax and cross-entropy are one kernel."""
    offload: str
    """What is kept in the host's memory: none, optimizer or parameters."""
    loss_chunks: int | str
    """Pieces in which the output layer and the loss run."""
    activation_checkpointing: str
    """auto, none, selective or full."""
    checkpointing: str
    """The same as `activation_checkpointing`."""
    shard_degree: int | str
    """Data-parallel ranks that share weights and states at ZeRO stages 2 and 3."""
    offload_activations: float | str
    """Share of the layers' activations that is kept in the host's memory until the backward pass."""
    recompute_modules: Sequence[str] | str
    """Modules of a layer to recompute in the backward pass, by their Megatron-Core names."""
    recompute_layers: int | str
    """Number of layers in each pipeline stage to recompute in full."""
    attention: str
    """auto, flash, eager, or a library such as cudnn, flash3 or flex."""
    execution: str
    """eager, compiled, cudaGraphs or xla."""
    memory_format: str
    """Memory format of images: contiguous or channelsLast."""
    input_samples_per_second: float | str
    """Samples per second that the input pipeline of each node delivers."""
    expert_dispatch: str
    """allToAll, allGather, deepEP or hybridEP."""
    expert_overlap: str
    """none, microBatch or sharedExpert."""
    expert_capacity: float | str
    """Room of each rank of experts, as a multiple of an even share of tokens."""
    expert_stash: float | str
    """Size of the stash of the experts' activations, as a multiple of an even share of tokens."""
    bucket_mib: int | str
    pipeline_schedule: str
    """Order of the passes in a pipeline."""
    pipeline_layout: str
    """Layers of each virtual stage."""
    gradient_sync: str
    parameter_servers: int | str
    server_updates: str
    lora_rank: int | str
    """Train only LoRA adapters of this rank."""
    lora_targets: str
    """all or attention."""
    dora: bool
    """Whether the adapters are DoRA's."""
    train_embeddings: bool
    """Whether embedding and head are trained whole beside adapters."""
    loss: str
    """Loss on preferences, such as dpo."""
    precomputed_reference: bool
    """Whether the reference model's log-probabilities are computed before training."""
    frozen_parts: list[str]
    """Parts of a model with towers that are not trained: vision, audio, projector, language."""
    quantization: str
    """Quantization of the frozen weights under LoRA adapters."""
    steps: int | str
    """Optimizer steps of the whole run, for the time and the cost to finish."""
    tokens: int | str
    """Tokens of the whole run, instead of steps."""
    exact_gpus: int | str
    """Use exactly this many GPUs (`spec.constraints.gpus`)."""
    max_gpus: int | str
    max_nodes: int | str
    max_tensor_parallel: int | str
    allowed_pools: Sequence[str] | str
    """Names of the pools to consider."""
    allow_sharing: bool
    """Whether the job may run on a MIG slice."""
    workload: str
    """training or inference."""
    objective: str
    """time (the default), cost, or another objective of `spec.objective`."""
    deadline: str | float
    """Seconds, or a text such as "36h" or "2026-12-01", the date to end by."""
    deadline_seconds: str | float
    """The same as `deadline`."""
    finish_by: str
    """The same as `deadline`."""
    budget: str | float
    """US dollars, or a text such as "5000EUR"; for objective fastestWithinBudget."""
    target_step_seconds: float | str
    """How long a step may take."""
    limits_at: str
    """End of the forecast's range that must meet the deadline and the target: forecast or upperBound."""
    command: str | Sequence[str]
    """Launch command, or name of a training configuration, that describes the job. The model may then be None."""
    lenient: bool
    """Whether to ignore launch options that affect speed or memory but are not modelled."""
    inputs: Any
    """Example inputs of a `torch.nn.Module`: a tensor, or a tuple of them."""
    gpus: str | Mapping[str, int]
    """Pools by GPU and count: "h100-sxm:16,l4:16", or {"h100-sxm": 16, "l4": 16}."""
    nodes: Any
    """Instead of `gpus`: a path to Nodes and GPUPools as kubectl prints them, or these objects as dictionaries."""
    context: str
    """Instead of `gpus`: a context of kubectl."""
    calibration: str
    """Path of corrections that `tilecast calibrate` wrote."""
    link: str
    """Name of the link in or between nodes, for every pool whose `gpus` entry names none."""


def advise(
    model: object,
    *,
    plan: str | None = None,
    baseline: str | None = None,
    measured: str | Sequence[str] | Mapping[str, float] = (),
    launcher: str | None = None,
    **settings: Unpack[JobSettings],
) -> Advice:
    """Return the best pool and plan for a job, with range, cost, reasons and alternatives.

    Args:
        model: a preset's name; a path of a config.json, a TrainingJob, an annotated job of another kind, a graph or an
            ONNX file; the same as a dictionary; a config of Transformers; a `torch.nn.Module`, with `inputs`.
        plan: the only plan to price, for instance "tp=2,dp=8".
        baseline: the configuration in use today, as POOL:N[:PLAN][=STEP], which the advice shows for comparison.
        measured: measured steps of the job, "POOL:N[/PLAN]=STEP" each, or a mapping from "POOL:N[/PLAN]" to seconds;
            they correct the forecast on every pool.
        launcher: a name from `launchers()`. Plans are limited to those that this launcher can run.
        **settings: how the job is trained, and where it may run.

    Raises:
        SpecError: something cannot be read, is missing, or contradicts the rest.

    >>> import tilecast
    >>> advice = tilecast.advise("gpt2", seq=1024, batch=64, gpus="h100-sxm:8,l4:8")
    >>> advice.best.pool.name
    'h100-sxm'
    """
    with name_arguments_in_errors():
        question = _build_inputs(model, settings, plan, baseline, measured, launcher)
        return Advice.from_advice(compute_advice(question).advice)


def forecast(
    model: object,
    *,
    plan: str | None = None,
    measured: str | Sequence[str] | Mapping[str, float] = (),
    **settings: Unpack[JobSettings],
) -> Forecast:
    """Return the forecast of a plan on one pool. Without a plan, return the forecast of the best plan.

    Args:
        model: as for `advise`.
        plan: for instance "tp=2,dp=8", or a plan as tables print it.
        measured: as for `advise`.
        **settings: as for `advise`.

    Raises:
        SpecError: something cannot be read, several pools are given, or the plan cannot run there.

    >>> import tilecast
    >>> tilecast.forecast("gpt2", seq=1024, batch=64, gpus="h100-sxm:8", plan="dp=8").gpus
    8
    """
    advice = advise(model, plan=plan, measured=measured, **settings)
    pools = [*(offer.pool.name for offer in advice.offers), *(item.pool for item in advice.rejections)]
    if len(pools) > 1:
        raise SpecError("gpus", f"{len(pools)} pools are given", "give one pool, or call advise() to compare them")
    if advice.best is None:
        refused = advice.rejections[0]
        raise SpecError("plan" if plan else "model", f"{refused.pool}: {refused.message}", refused.remedy)
    return advice.best


def fits(model: object, *, plan: str | None = None, **settings: Unpack[JobSettings]) -> Fits:
    """Return the fewest GPUs of each pool whose memory holds a job. If a pool cannot hold it, suggest a change.

    Args:
        model: as for `advise`.
        plan: the only plan to check. Without it, return the best plan on the fewest GPUs.
        **settings: as for `advise`. An objective is ignored.

    Raises:
        SpecError: something cannot be read, is missing, or contradicts the rest.

    >>> import tilecast
    >>> bool(tilecast.fits("llama-3.1-405b", seq=8192, batch=64, gpus="t4:8"))
    False
    """
    with name_arguments_in_errors():
        return Fits.from_advice(compute_advice(replace(_build_inputs(model, settings, plan), seeks_fewest=True)).advice)


def sweep(model: object, *, over: str, **settings: Unpack[JobSettings]) -> Sweep:
    """Return the advice for each of several values of one input, such as the batch size.

    Args:
        model: as for `advise`.
        over: FIELD=VALUES, for instance "training.globalBatchSize=64..512" or "pool.price=x0.5,x1,x2"; fields are
            numbers of the job's spec and those of `tilecast sweep --help`.
        **settings: as for `advise`.

    Raises:
        SpecError: the field is not known, or something else cannot be read.

    >>> import tilecast
    >>> swept = tilecast.sweep("gpt2", seq=1024, batch=64, gpus="l4:8", over="pool.gpus=4,8")
    >>> [row["gpus"] for row in swept.rows]
    [4, 8]
    """
    with name_arguments_in_errors():
        question = _build_inputs(model, settings)
        over_ = SweepRange.parse(over, "over")
        return Sweep.from_rows(over_.field, run_sweep(question.job, question.pools, over_))


def queue(
    jobs: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
    *,
    gpus: str | Mapping[str, int] | None = None,
    nodes: object = None,
    context: str | None = None,
    calibration: str | None = None,
    link: str | None = None,
    policy: str = "completion",
    order: str = "kueue",
    horizon: str | float | None = None,
    what_if: str | Sequence[str] = (),
    at: str | None = None,
    if_submitted: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> Queue:
    """Return a plan for a queue of jobs, with the pool, the start and the end of each job.

    Args:
        jobs: a file or folder of TrainingJobs and annotated jobs of other kinds, or these objects as dictionaries.
        gpus: pools by GPU and count, as for `advise`.
        nodes: nodes instead of `gpus`, as for `advise`.
        context: a context of kubectl instead of `gpus`.
        calibration: path of corrections that `tilecast calibrate` wrote.
        link: name of the link in or between the nodes of every pool.
        policy: a policy that `tilecast queue --help` lists.
        order: "kueue" or "free", the order in which jobs may start.
        horizon: deadline of jobs that have none, in seconds or as a text such as "36h".
        what_if: nodes to add or remove in a second plan for comparison, "POOL:+N" or "POOL:-N".
        at: the time to use as now, in ISO 8601. If absent, the current time.
        if_submitted: one more job, as a file or an object: the result has when it would start and end on each pool.

    Raises:
        SpecError: something cannot be read, or there is no job.
    """
    with name_arguments_in_errors():
        if policy not in POLICIES:
            raise SpecError("policy", f"{policy!r} is not known", f"known: {', '.join(POLICIES)}")
        if isinstance(jobs, str | os.PathLike):
            given = queue_inputs.read_documents(os.fspath(jobs), may_be_empty=if_submitted is not None)
        else:
            given = [dict(job) for job in jobs]
        changes = (what_if,) if isinstance(what_if, str) else tuple(what_if)
        pools = PoolOptions.from_arguments(nodes, gpus, context, calibration, link)
        limit = None if horizon is None else str(horizon)
        one_more = _read_submitted_job(if_submitted)
        return Queue.from_plan(plan_queue(QueueInputs(given, pools, policy, order, limit, changes, at, one_more)))


def _read_submitted_job(job: str | os.PathLike[str] | Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the documents of one more job. If there is none, return an empty list."""
    if job is None:
        return []
    return [dict(job)] if isinstance(job, Mapping) else queue_inputs.read_documents(os.fspath(job))


def gpus(name: str | None = None) -> Table | dict[str, Any]:
    """Return a table of all known GPUs. Given a name, return the specifications of that GPU with their sources.

    Raises:
        SpecError: no entry has that name.

    >>> import tilecast
    >>> "h100-sxm" in [row["GPU"] for row in tilecast.gpus()]
    True
    """
    return Table(catalog.list_gpu_rows()) if name is None else catalog.describe_gpu(name)


def models(name: str | None = None) -> Table | dict[str, Any]:
    """Return a table of all model presets. Given a name, return the dimensions of that preset.

    Raises:
        SpecError: no entry has that name.
    """
    return Table(catalog.list_model_rows()) if name is None else catalog.describe_model(name)


def links(name: str | None = None) -> Table | dict[str, Any]:
    """Return a table of all known links between GPUs. Given a name, return the specifications of that link.

    Raises:
        SpecError: no entry has that name.
    """
    return Table(catalog.list_link_rows()) if name is None else catalog.describe_link(name)


def launchers() -> tuple[str, ...]:
    """Return the names of the launchers for which Tilecast can write commands, such as `torchrun`."""
    return tuple(LAUNCHERS)


def _build_inputs(
    model: object,
    settings: Mapping[str, Any],
    plan: str | None = None,
    baseline: str | None = None,
    measured: str | Sequence[str] | Mapping[str, float] = (),
    launcher: str | None = None,
) -> AdviceInputs:
    """Return the arguments of a public function as `AdviceInputs`.

    Raises:
        TypeError: `settings` contains an unknown name.
        SpecError: a module comes without example inputs, or several of `nodes`, `gpus` and `context` are set.
    """
    given = {name: _to_python_number(value) for name, value in settings.items()}
    unknown = [name for name in given if name not in JobSettings.__annotations__]
    if unknown:
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}; known: {', '.join(JobSettings.__annotations__)}")
    where = [given.pop(name, None) for name in ("nodes", "gpus", "context", "calibration", "link")]
    example = given.pop("inputs", None)
    if isinstance(given.get("command"), str):
        given["command"] = split_command(given["command"])
    if hasattr(model, "named_parameters"):
        model = _trace_module(model, example)
    elif isinstance(model, os.PathLike):
        model = os.fspath(model)
    return AdviceInputs(
        JobOptions.from_values(model, given),
        PoolOptions.from_arguments(*where),
        baseline=baseline,
        plan=plan,
        measured=_format_measured_steps(measured),
        launch=launcher,
    )


def _to_python_number(value: Any) -> Any:
    """Return a NumPy scalar as a Python number. Return any other value unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def _trace_module(module: Any, inputs: Any) -> Any:
    """Return the operator graph of a `torch.nn.Module`, traced with the example inputs."""
    from tilecast.zoo.traced import torch_export

    if inputs is None:
        problem = "is missing, and a torch.nn.Module needs example inputs"
        raise SpecError("inputs", problem, "give inputs=tensor, or a tuple of tensors")
    return torch_export.trace_built_model(lambda: (module, inputs), type(module).__name__)


def _format_measured_steps(measured: str | Sequence[str] | Mapping[str, float]) -> tuple[str, ...]:
    """Return measured steps as texts, each in the syntax of `--measured`."""
    if isinstance(measured, str):
        return (measured,)
    if isinstance(measured, Mapping):
        return tuple(f"{where}={seconds!r}s" for where, seconds in measured.items())
    return tuple(measured)


@contextmanager
def name_arguments_in_errors() -> Iterator[None]:
    """Change a SpecError raised in the `with` block so that it names keyword arguments, not command-line flags.

    On exit, clear cached nodes, because files and clusters change while a notebook is open.
    """
    try:
        yield
    except SpecError as error:
        raise type(error)(
            *(_replace_flags_by_arguments(text) for text in (error.field, error.problem, error.remedy))
        ) from None
    finally:
        pool_inputs.clear_cached_nodes()


def _replace_flags_by_arguments(text: str) -> str:
    return re.sub(r"(?<![\w-])--([a-z][a-z-]*)", lambda match: match[1].replace("-", "_"), text)
