"""Plans that somebody states: exactly those, whether the search would look at them or not."""

from __future__ import annotations

import itertools

from tilecast.search import divisors
from tilecast.spec import CHECKPOINTING, Plan, Plans, SpecError, Stated, Workload


def plans(workload: Workload, gpus: int, stated: Stated, field: str) -> Plans:
    """Every plan on so many GPUs that agrees with what is stated; of a whole statement it is one.

    Raises:
        SpecError: the degrees do not make that many GPUs, or do not divide the model or the batch; `field` is what the
            error calls the statement.
    """
    model = workload.model
    data = _data(gpus, stated, field)
    if stated.tensor > 1 and (model.hidden == 0 or model.heads % stated.tensor):
        heads = f"the {model.heads} heads of {model.name}" if model.hidden else f"{model.name}, which has no heads"
        raise SpecError(field, f"tp={stated.tensor} does not divide {heads}", "choose a divisor")
    pieces = model.layers or (len(model.trace.operators) if model.trace else 1)
    if stated.pipeline * stated.virtual_stages > max(1, pieces):
        problem = f"pp={stated.pipeline} makes more stages than {model.name} has layers"
        raise SpecError(field, problem, f"use at most {max(1, pieces)}")
    experts = int(model.extra.get("experts", 1))
    if experts % stated.expert or (data * stated.tensor) % stated.expert:
        problem = f"ep={stated.expert} does not divide {experts} experts over {data * stated.tensor} ranks"
        raise SpecError(field, problem, "choose a divisor of both")
    if workload.global_batch % data:
        problem = f"dp={data} does not divide the global batch {workload.global_batch}"
        raise SpecError(field, problem, "choose a divisor")
    share = workload.global_batch // data
    micro = stated.micro_batch or workload.micro_batch
    if micro is not None and share % micro:
        problem = f"mb={micro} does not divide the {share} samples of a data-parallel rank"
        raise SpecError(field, problem, "choose a divisor")
    micros = [micro] if micro is not None else [b for b in divisors(share) if b & (b - 1) == 0 or b == share]
    checkpointing = stated.checkpointing or workload.checkpointing
    modes = [checkpointing] if checkpointing else CHECKPOINTING if workload.training else CHECKPOINTING[:1]
    stages = [stated.zero_stage] if stated.zero_stage is not None else [0, 1, 3] if data > 1 else [0]
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
                sequence_parallel=stated.tensor > 1,
                virtual_stages=stated.virtual_stages,
            )
            for size, stage, mode in itertools.product(micros, stages, modes)
        )
    )


def _data(gpus: int, stated: Stated, field: str) -> int:
    others = stated.tensor * stated.pipeline * stated.context
    if stated.data is None and gpus % others == 0:
        return gpus // others
    if stated.data is None or stated.data * others != gpus:
        told = f"{stated.data} x {others}" if stated.data else str(others)
        raise SpecError(field, f"degrees of {told} do not make {gpus} GPUs", "let them multiply to the GPU count")
    return stated.data
