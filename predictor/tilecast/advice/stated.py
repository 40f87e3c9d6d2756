"""Build the plans that agree with a statement, whether the search would consider them or not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from tilecast import search, zoo
from tilecast.search import divisors
from tilecast.spec import Plan, Plans, SpecError, Stated, Workload


def plans(workload: Workload, gpus: int, stated: Stated, field: str) -> Plans:
    """Return every plan on `gpus` GPUs that agrees with the statement; a complete statement gives exactly one.

    Raises:
        SpecError: the degrees do not multiply to the number of GPUs, or do not divide the model or the batch. Errors
            call the statement `field`.
    """
    data = _data(gpus, stated, field)
    if "spread_tables" in workload.model.extra and stated.expert == 1:
        stated = replace(stated, expert=data)
    _require_shards(workload, data, stated, field)
    if workload.global_batch % data:
        problem = f"dp={data} does not divide the global batch {workload.global_batch}"
        raise SpecError(field, problem, "choose a divisor")
    share = workload.global_batch // data
    micro = stated.micro_batch or workload.micro_batch
    if micro is not None and share % micro:
        problem = f"mb={micro} does not divide the {share} samples of a data-parallel rank"
        raise SpecError(field, problem, "choose a divisor")
    if stated.virtual_stages > 1 and micro is not None and share // micro % stated.pipeline:
        problem = (
            f"vp={stated.virtual_stages} needs micro-batches that pp={stated.pipeline} divides, not {share // micro}"
        )
        raise SpecError(field, problem, "change mb, or leave vp out")
    micros = [micro] if micro is not None else [b for b in divisors(share) if b & (b - 1) == 0 or b == share]
    checkpointing = stated.checkpointing or workload.checkpointing
    if checkpointing:
        zoo.refuse_recomputation(workload.model, checkpointing, field)
    modes = [checkpointing] if checkpointing else zoo.recomputes(workload.model)[: None if workload.training else 1]
    is_served = workload.gradient_sync == "parameterServer"
    if is_served and stated.zero_stage:
        problem = f"zero={stated.zero_stage} spreads gradients that a parameter server sums whole"
        raise SpecError(field, problem, "leave zero out, or use training.gradientSync allReduce")
    zeros = range(4) if data * stated.context > 1 and workload.training and not is_served else range(1)
    stages = zeros if stated.zero_stage is None else [stated.zero_stage]
    can_spread = stated.tensor > 1 and workload.sequence_length // stated.context % stated.tensor == 0
    if stated.sequence_parallel and not can_spread:
        raise SpecError(field, f"sp=1 finds no tokens that tp={stated.tensor} divides", "leave sp out")
    norms = [False, True][: 1 + can_spread] if stated.sequence_parallel is None else [stated.sequence_parallel]
    return Plans.of(
        *(
            Plan(
                data=data,
                tensor=stated.tensor,
                pipeline=stated.pipeline,
                context=stated.context,
                expert=stated.expert,
                zero_stage=stage,
                micro_batch=size,
                gradient_accumulation=share // size,
                checkpointing=mode,
                sequence_parallel=split,
                virtual_stages=stated.virtual_stages,
            )
            for size, stage, mode, split in itertools.product(micros, stages, modes, norms)
        )
    )


def _require_shards(workload: Workload, data: int, stated: Stated, field: str) -> None:
    """Raise SpecError unless every degree divides what it splits."""
    model = workload.model
    tensor, pipeline, context, virtual = stated.tensor, stated.pipeline, stated.context, stated.virtual_stages
    whole = {} if model.hidden else {"tp": tensor, "cp": context}
    if whole and not model.trace:
        whole |= {"pp": pipeline, "vp": virtual}
    for name, degree in whole.items():
        if degree > 1:
            kind = (
                "whose trace is cut into stages alone" if model.trace else "whose family is priced data parallel alone"
            )
            raise SpecError(field, f"{name}={degree} does not split {model.name}, {kind}", f"leave {name} out")
    if not search.splits_heads(workload, tensor):
        text = f"the {model.heads} heads, {model.kv_heads} key/value heads and the MLP of {model.name}"
        raise SpecError(field, f"tp={tensor} does not divide {text}", "choose a divisor")
    if pipeline > 1 and not search.stages_are_full(workload, pipeline):
        raise SpecError(field, f"pp={pipeline} leaves stages of {model.name} without a layer", "lower it")
    if virtual > 1 and (pipeline == 1 or model.layers % (pipeline * virtual)):
        problem = f"vp={virtual} with pp={pipeline} does not divide the {model.layers} layers of {model.name}"
        raise SpecError(field, problem, "choose a divisor, or leave vp out")
    pieces = 2 * context if model.causal else context
    if context > 1 and workload.sequence_length % pieces:
        problem = f"cp={context} does not cut {workload.sequence_length} tokens into {pieces} pieces"
        raise SpecError(field, problem, "choose a divisor")
    if zoo.spreads_rows(model):
        if stated.expert not in search.expert_degrees(model, np.array([data]))[0]:
            text = f"ep={stated.expert} does not spread the rows of {model.name} over {data} ranks"
            raise SpecError(field, text, f"write ep={data}")
        return
    experts = int(model.extra.get("experts", 1))
    if stated.expert > 1 and experts == 1:
        problem = f"ep={stated.expert} spreads experts, of which {model.name} has none"
        raise SpecError(field, problem, "leave ep out")
    if experts % stated.expert or (data * tensor) % stated.expert:
        problem = f"ep={stated.expert} does not divide {experts} experts over {data * tensor} ranks"
        raise SpecError(field, problem, "choose a divisor of both")


def _data(gpus: int, stated: Stated, field: str) -> int:
    others = stated.tensor * stated.pipeline * stated.context
    if stated.data is None and gpus % others == 0:
        return gpus // others
    if stated.data is None or stated.data * others != gpus:
        text = f"{stated.data} x {others}" if stated.data else str(others)
        raise SpecError(field, f"degrees of {text} do not make {gpus} GPUs", "let them multiply to the GPU count")
    return stated.data
