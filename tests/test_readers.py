"""What launch writers print is read back as the plan that was written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilecast import readers, zoo
from tilecast.inputs.job import read_job
from tilecast.inputs.job_options import JobOptions
from tilecast.inputs.pools import PoolOptions
from tilecast.public.asking import AdviceInputs, compute_advice
from tilecast.readers import models
from tilecast.render.launch import LaunchSetting, write_launch
from tilecast.spec import PartialPlan, Plan, SpecError, Workload

MODELS = (
    "llama-3.1-8b",
    "llama-2-70b",
    "mixtral-8x7b",
    "deepseek-v3",
    "qwen3-8b",
    "gpt2",
    "bert-large",
    "qwen3-30b-a3b",
)
MODES = ("none", "selective", "full", "layernorm+moe_act", "core_attn+mlp")


@st.composite
def megatron_settings(draw: st.DrawFn) -> LaunchSetting:
    """Return a plan of Megatron-LM with its job."""
    model = zoo.find_preset(draw(st.sampled_from(MODELS)))
    powers = st.sampled_from([1, 1, 2, 4, 8])
    tensor, pipeline, context, data = (draw(powers) for _ in range(4))
    micro, steps = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 3, 8]))
    mode = draw(st.sampled_from(MODES))
    try:
        mode = mode if mode in ("none", "selective", "full") else PartialPlan.parse(f"ac={mode}", "x").checkpointing
    except SpecError:
        mode = "full"
    experts = zoo.count_experts(model) > 0
    plan = Plan(
        data=data, tensor=tensor, pipeline=pipeline, context=context, micro_batch=micro, gradient_accumulation=steps,
        expert=draw(powers) if experts else 1, expert_tensor=draw(st.sampled_from([1, tensor])) if experts else 1,
        zero_stage=draw(st.sampled_from([0, 1])), checkpointing=mode,
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        virtual_stages=draw(st.sampled_from([1, 2])) if pipeline > 1 else 1,
    )  # fmt: skip
    lengths = [length for length in (512, 1024, 4096) if model.rotary or length <= model.positions]
    workload = Workload(
        model, draw(st.sampled_from(lengths)), data * micro * steps, steps=draw(st.sampled_from([None, 100])),
        precision=draw(st.sampled_from(["bf16", "fp16", "fp32", "fp8", "mxfp8"])),
        attention=draw(st.sampled_from(["auto", "flash", "eager", "cudnn"])), framework="megatron",
        gradient_precision=draw(st.sampled_from([None, "bf16"])),
        recompute_layers=draw(st.sampled_from([None, 2])) if mode == "full" else None,
    )  # fmt: skip
    return LaunchSetting("job", workload, plan, "h100-sxm", max(1, plan.gpus // 8), min(8, plan.gpus), 1.0)


def written(launcher: str, setting: LaunchSetting) -> Any:
    try:
        return write_launch(launcher, setting)
    except SpecError:
        return None


COLUMNS = (
    "data", "tensor", "pipeline", "context", "expert", "expert_tensor", "virtual_stages", "zero_stage", "micro_batch",
    "checkpointing", "sequence_parallel",
)  # fmt: skip


def assert_same_plan(found: PartialPlan, plan: Plan) -> None:
    assert {name: getattr(found, name) for name in COLUMNS} == {name: getattr(plan, name) for name in COLUMNS}


def check_megatron(setting: LaunchSetting, folder: Path) -> None:
    launch = written("megatron", setting)
    if launch is None:
        return
    (folder / "run.sh").write_text(launch.format_bash_script())
    from_script, from_words = readers.read_file(str(folder / "run.sh")), readers.read_words(launch.command)
    assert replace(from_words, origins={}) == replace(from_script, origins={})
    assert_same_plan(from_words.plan, setting.plan)
    assert from_words.unknown == ()
    assert from_words.unpriced == {}
    workload = setting.workload
    request = read_job(JobOptions(str(folder / "run.sh"))).request()
    got, want = request.workload, workload
    assert (got.sequence_length, got.global_batch, got.precision) == (
        want.sequence_length,
        want.global_batch,
        want.precision,
    )
    assert (got.steps, got.recompute_layers) == (want.steps, want.recompute_layers)
    assert got.framework == "megatron"
    assert got.attention == want.attention
    assert models.dimensions(got.model) == models.dimensions(want.model)


@given(megatron_settings())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_megatron_command_is_read_as_the_plan_that_was_written(tmp_path: Path, setting: LaunchSetting) -> None:
    check_megatron(setting, tmp_path)


@pytest.mark.slow
@given(megatron_settings())
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_500_megatron_commands_are_read_as_their_plans(tmp_path: Path, setting: LaunchSetting) -> None:
    check_megatron(setting, tmp_path)


TORCHRUN = "torchrun --nproc-per-node 8 pretrain_gpt.py --micro-batch-size 1 "


@pytest.mark.parametrize(
    ("text", "field", "problem"),
    [
        (TORCHRUN + '--tensor-model-parallel-size "8', "run.sh: line 1", 'a " is not closed'),
        ("ARGS=(--lr 1\n", "run.sh", "ends within an array"),
        ("if true; then\n" + TORCHRUN, "run.sh", "ends within `if`"),
        ("cat > a.json <<EOF\n{", "run.sh", "ends before 'EOF'"),
        ("torchrun --nproc-per-node 8", "run.sh", "torchrun names no program"),
        (TORCHRUN + "--tensor-model-parallel-size", "run.sh: --tensor-model-parallel-size", "has no value"),
        (TORCHRUN + "--tensor-model-parallel-size $(nproc)", "run.sh: --tensor-model-parallel-size", "not literal"),
        (TORCHRUN + "--tensor-model-parallel-size $TP", "run.sh: --tensor-model-parallel-size", "that of TP"),
        (TORCHRUN + "--tensor-model-parallel-size 2x", "run.sh: --tensor-model-parallel-size", "is no count"),
        (TORCHRUN + "--bf16 --fp16", "run.sh: --fp16", "and --bf16 says bf16"),
        (TORCHRUN + "--tensor-model-parallel-size 3", "run.sh", "do not divide 8 GPUs"),
        (
            TORCHRUN + "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --global-batch-size 12",
            "run.sh",
            "12 is",
        ),
        (TORCHRUN + "--num-layers 2 --hidden-size 64", "run.sh: --num-attention-heads", "is missing"),
        ("x" * 2**20, "run.sh: line 1", "is longer than 64 KiB"),
        ("x\n" * 2**20, "run.sh", "is longer than 1 MiB"),
        ("a\0b", "run.sh", "is binary"),
        ("echo hello\n", "run.sh", "holds no launch line"),
        (TORCHRUN + "\ntorchrun other.py\n", "run.sh", "launches 2 jobs"),
    ],
)
def test_bad_scripts_are_refused_in_one_line(tmp_path: Path, text: str, field: str, problem: str) -> None:
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(SpecError) as caught:
        readers.read_file(str(tmp_path / "run.sh"))
    error = str(caught.value).replace(f"{tmp_path}/", "")
    assert error.startswith(field)
    assert problem in error
    assert "\n" not in error
    assert len(error) < 300


GPT = (
    TORCHRUN + "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --swiglu --bf16 "
    "--num-query-groups 8 --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --seq-length 4096 "
    "--global-batch-size 64 --tensor-model-parallel-size 2 "
)


def script_plan(tmp_path: Path, text: str) -> tuple[str, int | None]:
    (tmp_path / "run.sh").write_text(text)
    found = readers.read_file(str(tmp_path / "run.sh"))
    return found.plan_text(), found.gpus


@pytest.mark.parametrize(
    "text",
    [
        "TP=2\nARGS=(\n  --tensor-model-parallel-size $TP # shared\n)\n" + GPT + '"${ARGS[@]}"',
        'if [ "$#" -lt 1 ]; then\n  echo usage\n  exit 1\nfi\n' + GPT,
        'A="\n  --num-layers 32 \\\n  --bf16\n"\n' + GPT.replace("--num-layers 32", "$A").replace("--bf16", ""),
        'CMD="' + GPT + '"\necho $CMD\neval $CMD',
        "srun bash -c '" + GPT + "'",
        GPT + "2>&1 | tee log.txt",
        GPT.replace("--nproc-per-node 8", "--nproc_per_node=${GPUS:-8} --master_addr $(hostname -I | cut -d' ' -f1)"),
        "N=4\n" + GPT.replace("--nproc-per-node 8", "--nproc-per-node $((N * 2))"),
        "TP=2\nif [ $TP -gt 1 ]; then\n  X=2\nelse\n  X=$(date)\nfi\n" + GPT.replace("size 2", "size $X"),
        "python -m " + GPT.replace("torchrun", "torch.distributed.run"),
    ],
)
def test_literal_variables_of_a_script_are_resolved(tmp_path: Path, text: str) -> None:
    assert script_plan(tmp_path, text) == ("dp=4,tp=2,mb=1", 8)


def test_a_branch_that_only_a_run_would_take_is_unknown(tmp_path: Path) -> None:
    text = 'TP=2\nif [ "$MODE" = big ]; then TP=4; fi\n' + GPT + "--tensor-model-parallel-size $TP"
    with pytest.raises(SpecError, match="not literal"):
        script_plan(tmp_path, text)


def test_an_option_that_changes_speed_and_is_not_priced_is_an_error_unless_lenient() -> None:
    words = (GPT + "--use-torch-fsdp2 --my-own 3 --lr 1").split()
    with pytest.raises(SpecError, match=r"--use-torch-fsdp2: .*--lenient"):
        read_job(JobOptions(None, command=words))
    job = read_job(JobOptions(None, command=words, lenient=True))
    assert job.launch is not None
    assert job.launch.unknown == ("--my-own",)
    assert job.request().workload.global_batch == 64


def test_flags_and_a_named_model_take_precedence() -> None:
    job = read_job(JobOptions("llama-2-7b", {"batch": 128, "precision": "fp16"}, GPT.split()))
    workload = job.request().workload
    assert (workload.model.name, workload.global_batch, workload.precision) == ("llama-2-7b", 128, "fp16")


def test_advice_ends_in_the_options_to_change() -> None:
    words = [*GPT.split(), "--use-distributed-optimizer"]
    inputs = AdviceInputs(JobOptions(None, command=words), PoolOptions(gpus="h100-sxm:8"))
    advice = compute_advice(inputs).advice
    assert advice.baseline is not None
    assert str(advice.baseline.plan) == "zero1-dp4,tp2,mb1"
    assert advice.notes[-1].startswith("Change ")
    assert "as fast. " in advice.notes[-1]
    assert "--tensor-model-parallel-size 2 -> " in advice.notes[-1] or "add --" in advice.notes[-1]


def test_a_plan_that_does_not_fit_is_told_what_to_change() -> None:
    inputs = AdviceInputs(JobOptions(None, command=GPT.split()), PoolOptions(gpus="h100-sxm:8"))
    advice = compute_advice(inputs).advice
    assert advice.baseline is None
    assert "add --use-distributed-optimizer" in advice.notes[-1]
