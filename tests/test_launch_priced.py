"""Prices and commands agree: every choice that changes a price changes the command, for every launcher."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tilecast import memory, readers, search, zoo
from tilecast.frameworks import FRAMEWORKS
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.render.launch import LAUNCHERS, LaunchScript, LaunchSetting, write_launch
from tilecast.spec import Framework, Plan, Plans, SpecError, Workload

LLAMA = Workload(zoo.find_preset("llama-3.1-8b"), 8192, 128, steps=1000)
RESNET = Workload(zoo.find_preset("resnet-50"), 1, 1024, "fp16", optimizer="momentum")
MIXTRAL = Workload(zoo.find_preset("mixtral-8x7b"), 4096, 256)
JOBS = {"llama": LLAMA, "resnet": RESNET, "mixtral": MIXTRAL}
POOL = Pool("h100-sxm", find_gpu("h100-sxm"), 8, 2, find_link("nvlink4"), find_link("infiniband-ndr-8x400"))
STAGE = {"torchrun": 0, "fsdp2": 3, "deepspeed": 1, "megatron": 1, "torchtitan": 3, "accelerate": 3, "trainer": 3}
"""ZeRO stage that each launcher supports with every other degree."""

WORKLOADS: list[dict[str, object]] = [
    *({"precision": name} for name in ("fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")),
    *({"optimizer": name} for name in ("sgd", "momentum", "adamw", "lamb")),
    *({"execution": name} for name in ("eager", "compiled", "cudaGraphs")),
    *({"attention": name} for name in ("auto", "flash", "eager", "flash2", "cudnn")),
    *({"offload": name} for name in ("none", "optimizer", "parameters")),
    {"lora_rank": 16},
    {"lora_rank": 16, "frozen_bits": 4.5},
    {"fused_loss": True},
    {"memory_format": "channelsLast"},
    {"fused_optimizer": False},
    {"bucket_mib": 100},
]
EXPERTS: list[dict[str, object]] = [
    *({"expert_dispatch": name} for name in ("allToAll", "allGather", "deepEP", "hybridEP")),
    *({"expert_dispatch": "hybridEP", "expert_capacity": room} for room in (1.5, 2.0)),
    *({"expert_dispatch": "hybridEP", "expert_capacity": 2.0, "expert_stash": size} for size in (1.1, 1.5)),
    *({"expert_overlap": name} for name in ("none", "microBatch", "sharedExpert")),
]
PLANS: list[dict[str, object]] = [
    {},
    {"micro_batch": 2, "gradient_accumulation": 4},
    *({"zero_stage": stage} for stage in range(4)),
    *({"checkpointing": mode} for mode in ("none", "selective", "full")),
    {"data": 8, "tensor": 2},
    {"data": 8, "tensor": 2, "sequence_parallel": True},
    {"data": 8, "pipeline": 2},
    {"data": 8, "pipeline": 2, "virtual_stages": 2},
    {"data": 8, "context": 2},
    {"expert": 8},
]


def setting(workload: Workload, plan: Plan) -> LaunchSetting:
    return LaunchSetting("job", workload, plan, "h100-sxm", 2, 8, 1.5)


def base(launcher: str) -> Plan:
    return Plan(data=16, micro_batch=1, gradient_accumulation=8, zero_stage=STAGE[launcher])


def printed(launcher: str, workload: Workload, plan: Plan) -> LaunchScript | None:
    """Return the launch, or None where the launcher refuses, which it must do in one line."""
    try:
        return write_launch(launcher, setting(workload, plan))
    except SpecError as error:
        assert error.field == "--launch"
        assert "\n" not in str(error)
        return None


def bill(workload: Workload, plan: Plan) -> tuple[float, ...]:
    plans = Plans.from_plans(plan)
    footprint = memory.footprint(workload, zoo.build_sharded_graph(workload, plans), plans)
    return tuple(footprint.items(0).values())


def price(launcher: str, workload: Workload, plan: Plan) -> tuple[float, float]:
    """Return seconds of a step and bytes of a GPU, as the launcher's framework runs it."""
    framework = LAUNCHERS[launcher].frameworks[0 if plan.zero_stage == 0 else -1]
    prices = search.price(replace(workload, framework=framework), Plans.from_plans(plan), POOL)
    return float(prices.step_s[0]), float(prices.memory_bytes[0])


def untold(launcher: str, choices: list[tuple[Workload, Plan]]) -> list[object]:
    """Return the choices with the command of the first choice but another price.

    Choices that the launcher refuses are not among them.
    """
    (first, *others) = choices
    reference = printed(launcher, *first)
    assert reference is not None, (launcher, first)
    alike = [one for one in others if printed(launcher, *one) == reference]
    return [one for one in alike if price(launcher, *one) != price(launcher, *first)]


@pytest.mark.parametrize("job", ["llama", "resnet"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_choice_of_the_job_is_told_or_refused(launcher: str, job: str) -> None:
    if job == "resnet" and launcher in ("megatron", "torchtitan"):
        assert printed(launcher, JOBS[job], base(launcher)) is None
        return
    own = JOBS[job]
    silent = {"attention", "lora_rank", "fused_loss"} if job == "resnet" else {"memory_format"}
    choices = [one for one in WORKLOADS if not silent & set(one)]
    plan = base(launcher)
    assert untold(launcher, [(own, plan), *((replace(own, **one), plan) for one in choices)]) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("job", ["llama", "mixtral"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_choice_of_the_plan_is_told_or_refused(launcher: str, job: str) -> None:
    own, plan = JOBS[job], base(launcher)
    plans = [replace(plan, **one) for one in PLANS if "expert" not in one or job == "mixtral"]  # type: ignore[arg-type]
    assert untold(launcher, [(own, plan), *((own, one) for one in plans)]) == []


def test_a_choice_of_the_experts_is_told() -> None:
    plan = replace(base("megatron"), expert=8)
    choices = [(MIXTRAL, plan), *((replace(MIXTRAL, **one), plan) for one in EXPERTS)]  # type: ignore[arg-type]
    assert untold("megatron", choices) == []
    flexible = printed("megatron", replace(MIXTRAL, expert_dispatch="deepEP"), plan)
    assert flexible is not None
    assert "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep" in " ".join(flexible.command)


@pytest.mark.parametrize(
    "choice",
    [
        {"expert_overlap": "sharedExpert"},
        {"expert_overlap": "sharedExpert", "expert_dispatch": "deepEP"},
        {"expert_dispatch": "hybridEP", "expert_capacity": 1.5},
        {"expert_dispatch": "hybridEP", "expert_capacity": 2.0, "expert_stash": 1.25},
    ],
)
def test_buffers_of_experts_are_read_as_they_were_written(choice: dict[str, object]) -> None:
    job = replace(MIXTRAL, framework="megatron", **choice)  # type: ignore[arg-type]
    line = printed("megatron", job, replace(base("megatron"), expert=8))
    assert line is not None
    read = readers.read_words(list(line.command), gpus=16, has_model=False)
    assert not read.unpriced
    assert not read.unknown
    stated = {"expert_overlap": "expertOverlap", "expert_capacity": "expertCapacity", "expert_stash": "expertStash"}
    assert {name: read.training.get(key) for name, key in stated.items()} == {name: choice.get(name) for name in stated}


def test_shared_experts_are_not_told_where_megatron_refuses_them() -> None:
    job = replace(MIXTRAL, framework="megatron", expert_overlap="sharedExpert")
    plan = replace(base("megatron"), expert=8)
    assert printed("megatron", job, plan) is not None
    assert printed("megatron", job, replace(plan, checkpointing="shared_experts")) is None
    assert printed("megatron", replace(job, expert_dispatch="allGather"), plan) is None


@pytest.mark.parametrize(
    ("launcher", "framework", "problem", "unsaid"),
    [
        ("fsdp2", "torchtune", "model = model.to(torch.bfloat16)", "mp_policy"),
        ("fsdp2", "composer", "CrossEntropyLoss(inplace_backward=True)", "model.to("),
        ("torchrun", "lightning", "torch.autocast", "CrossEntropyLoss"),
        ("megatron", "nemo", "--cross-entropy-fusion-impl te", "--no-gradient-accumulation-fusion"),
        ("megatron", "megatron", "--accumulate-allreduce-grads-in-fp32", "--cross-entropy-loss-fusion"),
    ],
)
def test_a_framework_over_another_is_printed_by_its_own_cells(
    launcher: str, framework: Framework, problem: str, unsaid: str
) -> None:
    line = printed(launcher, replace(LLAMA, framework=framework), base(launcher))
    assert line is not None
    everything = " ".join([*line.command, *line.files.values(), *line.script])
    assert problem in everything
    assert unsaid not in everything


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_gradients_are_printed_as_they_are_held(launcher: str, precision: str) -> None:
    """A gradient takes the bytes of the type that the command requests."""
    workload = replace(LLAMA, precision=precision)  # type: ignore[arg-type]
    line = printed(launcher, workload, base(launcher))
    if line is None:
        assert (launcher, precision) == ("torchtitan", "fp16")
        return
    framework = LAUNCHERS[launcher].frameworks[-1]
    priced = replace(workload, framework=framework)
    wide = not workload.is_mixed or FRAMEWORKS[framework].has_fp32_gradients(priced)
    everything = " ".join([*line.command, *line.files.values(), *line.script])
    asked = {
        "torchrun": "autocast" in everything or precision == "fp32",
        "fsdp2": "reduce_dtype=torch.float32" in everything or precision == "fp32",
        "deepspeed": '"grad_accum_dtype": "fp32"' in everything or precision == "fp32",
        "megatron": "--accumulate-allreduce-grads-in-fp32" in everything or precision == "fp32",
        "torchtitan": 'mixed_precision_reduce="float32"' in everything,
        "accelerate": "reduce_dtype=torch.float32" in everything or precision == "fp32",
        "trainer": "reduce_dtype=torch.float32" in everything or precision == "fp32",
    }
    assert asked[launcher] == wide
    parameters = zoo.count_parameters(LLAMA)
    plan = Plan(data=1, gradient_accumulation=2)
    gradients = bill(priced, plan)[1]
    assert gradients == pytest.approx(parameters * (4 if wide else 2), rel=1e-6)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.slow
def test_the_lines_of_a_script_are_python(launcher: str) -> None:
    for job in JOBS.values():
        for one in WORKLOADS:
            for plan in PLANS:
                workload = replace(job, **one)  # type: ignore[arg-type]
                output = printed(launcher, workload, replace(base(launcher), **plan))  # type: ignore[arg-type]
                if output is not None:
                    ast.parse("\n".join(output.script))
                    assert all(len(line) <= 140 for line in output.script)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_clipping_and_the_allocator_are_asked_for_as_priced(launcher: str) -> None:
    line = printed(launcher, LLAMA, base(launcher))
    assert line is not None
    cells = FRAMEWORKS[LAUNCHERS[launcher].frameworks[-1]]
    everything = " ".join([*line.command, *line.files.values(), *line.script])
    words = (
        "clip_grad_norm_(model.parameters(), 1.0)",
        '"gradient_clipping": 1.0',
        "--clip-grad 1.0",
        "max_norm=1.0",
    )
    assert any(word in everything for word in (*words, "--max_grad_norm 1.0")) == cells.clips_gradients
    assert ("expandable_segments:True" in " ".join(line.environment.values())) == (cells.allocator == "expandable")


ADAPTING = [("torchrun", 0), ("fsdp2", 3), ("deepspeed", 3), ("accelerate", 3), ("trainer", 0), ("trainer", 3)]


@pytest.mark.parametrize(("launcher", "stage"), ADAPTING)
def test_quantized_weights_that_are_spread_are_stored_as_floats(launcher: str, stage: int) -> None:
    plan = replace(base(launcher), zero_stage=stage)
    output = printed(launcher, replace(LLAMA, lora_rank=16, frozen_bits=4), plan)
    assert output is not None
    starts = ("quantized = BitsAndBytesConfig(", "model = AutoModelForCausalLM.from_pretrained(", "model = peft.")
    config, model, adapted = (
        next(place for place, line in enumerate(output.script) if line.startswith(start)) for start in starts
    )
    line = output.script[config + 1]
    assert 'bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16' in line
    assert ("bnb_4bit_quant_storage=torch.bfloat16" in line) is (stage == 3)
    assert config < model < adapted
    assert "quantization_config=quantized" in output.script[model + 1]


@pytest.mark.parametrize(("launcher", "stage"), ADAPTING)
def test_adapters_are_added_where_they_are_priced(launcher: str, stage: int) -> None:
    plan = replace(base(launcher), zero_stage=stage)
    for targets, options in (("all", 'r=16, target_modules="all-linear"'), ("attention", "r=16")):
        job = replace(LLAMA, lora_rank=16, lora_targets=targets)  # type: ignore[arg-type]
        output = printed(launcher, job, plan)
        assert output is not None
        assert f"model = peft.get_peft_model(model, LoraConfig({options}))" in output.script
        output = printed(launcher, replace(job, dora=True), plan)
        assert output is not None
        assert f"model = peft.get_peft_model(model, LoraConfig({options}, use_dora=True))" in output.script


@pytest.mark.parametrize(("launcher", "stage"), ADAPTING)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_weights_beside_adapters_are_loaded_as_they_are_billed(launcher: str, stage: int, precision: str) -> None:
    plan = replace(base(launcher), zero_stage=stage)
    job = replace(LLAMA, precision=precision, lora_rank=16)  # type: ignore[arg-type]
    output = printed(launcher, job, plan)
    assert output is not None
    sharded = zoo.build_sharded_graph(job, Plans.from_plans(plan))
    billed = float(sharded.frozen_bytes(job, Plans.from_plans(plan))[0])
    dtype = {4.0: "torch.float32", 2.0: {"fp16": "torch.float16"}.get(precision, "torch.bfloat16")}[billed]
    (line,) = [one for one in output.script if "checkpoint, dtype=" in one]
    assert f"dtype={dtype}" in line and "quantization_config" not in line
    assert sum("from_pretrained" in one or "from_config" in one for one in output.script) == 1


def test_buckets_of_deepspeed_take_what_is_billed() -> None:
    """Overlap holds 4.5 buckets of each kind; the bill has one of each below stage 3, and 4.5 in stage 3.

    The framework or the job states the size of a bucket, whether or not the job would hide gradients.
    """
    sized = replace(LLAMA, framework="deepspeed", bucket_mib=100)
    for stage, elements, job in (
        (1, 2 * 5e8, LLAMA), (2, 2 * 5e8, LLAMA), (3, 9 * 5e8, LLAMA), (3, 9 * 5e8, replace(LLAMA, overlap=False)),
        (1, 2 * 50 * 2**20, sized), (3, 9 * 50 * 2**20, sized),
    ):  # fmt: skip
        plan = replace(base("deepspeed"), zero_stage=stage)
        line = printed("deepspeed", job, plan)
        assert line is not None
        zero = yaml.safe_load(line.files["ds_config.json"])["zero_optimization"]
        assert zero["overlap_comm"] is (stage == 3)
        each = 4.5 if zero["overlap_comm"] else 1.0
        held = each * (zero["reduce_bucket_size"] + zero["allgather_bucket_size"])
        assert held == pytest.approx(elements, rel=1e-6)
        plans, priced = Plans.from_plans(plan), replace(job, framework="deepspeed")
        billed = memory.footprint(priced, zoo.build_sharded_graph(priced, plans), plans).buffers[0]
        assert billed == pytest.approx(2 * held, rel=1e-6)  # 16-bit gradients
    assert printed("deepspeed", sized, replace(base("deepspeed"), zero_stage=0)) is None


@pytest.mark.parametrize("version", ["0.16.1", "0.19.0"])
@pytest.mark.slow
def test_options_of_megatron_are_options_of_megatron(version: str) -> None:
    """Each option used here is a field of Megatron's configuration or an option of its parser.

    It has a value where that takes one.
    """
    known = tomllib.loads((Path(__file__).parent / "megatron.toml").read_text())
    takes = {f"--{name.replace('_', '-')}": False for name in known["core"][version]["flags"]}
    takes |= {f"--{name.replace('_', '-')}": True for name in known["core"][version]["values"]}
    takes |= {f"--{name}": kind == "value" for name, (kind, _) in known["arguments"].items()}
    seen = set[str]()
    families = (LLAMA, MIXTRAL, *(Workload(zoo.find_preset(name), 512, 128) for name in ("t5-large", "bert-large")))
    deepseek = Workload(zoo.find_preset("deepseek-v3"), 4096, 4096, precision="fp8", framework="nemo")
    narrow = replace(LLAMA, gradient_precision="bf16", moment_precision="bf16")
    for job in (*families, deepseek, narrow, replace(LLAMA, framework="nemo")):
        for one in WORKLOADS:
            for plan in PLANS:
                line = printed("megatron", replace(job, **one), replace(base("megatron"), **plan))  # type: ignore[arg-type]
                words = list(line.command if line else ())
                script = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
                for word, after in pairwise([*words[script + 1 :], "--"]):
                    if word.startswith("--"):
                        seen.add(word)
                        assert takes[word] != after.startswith("--"), word
    assert len(seen) > 50
    unused = {f"--{name}" for name in known["arguments"]} - seen
    assert unused <= {"--no-gradient-accumulation-fusion", "--decoder-last-pipeline-num-layers"}


@pytest.mark.parametrize("version", ["0.4", "0.15"])
def test_megatron_is_told_to_hide_gradients_where_that_was_priced(version: str) -> None:
    job = replace(LLAMA, framework="megatron", framework_version=version)
    script = printed("megatron", job, base("megatron"))
    assert script is not None
    text = str(script)
    assert ("--overlap-grad-reduce" in text) == ("--overlap-param-gather" in text) == (version == "0.15")
