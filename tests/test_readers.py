"""What launch writers print is read back as the plan that was written."""

from __future__ import annotations

import io
import json
import os
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilecast
from tilecast import readers, zoo
from tilecast.advice import Advice
from tilecast.inputs import launches
from tilecast.inputs.job import read_job
from tilecast.inputs.job_options import JobOptions
from tilecast.inputs.pools import PoolOptions
from tilecast.launch_options.options_table import OptionTable
from tilecast.public.advising import AdviceInputs, compute_advice
from tilecast.readers import models, shell
from tilecast.readers.command import find_launch, read_command
from tilecast.readers.shell import read_script
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


def check_megatron(setting: LaunchSetting, folder: Path) -> bool:
    """Check that a launch is read as its plan. Return whether the launcher wrote one."""
    launch = written("megatron", setting)
    if launch is None:
        return False
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
    return True


@given(megatron_settings())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_megatron_command_is_read_as_the_plan_that_was_written(tmp_path: Path, setting: LaunchSetting) -> None:
    check_megatron(setting, tmp_path)


@pytest.mark.long
def test_500_megatron_commands_are_read_as_their_plans(tmp_path: Path) -> None:
    count = 0

    @given(megatron_settings())
    @settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def check(setting: LaunchSetting) -> None:
        nonlocal count
        count += check_megatron(setting, tmp_path)

    check()
    assert count >= 500


STAGES = {"torchtitan": (0, 2, 3), "trainer": (0, 2, 3), "accelerate": (0, 2, 3), "deepspeed": (0, 1, 2, 3)}
STATED = {
    "torchtitan": COLUMNS,
    "trainer": COLUMNS,
    "deepspeed": ("data", "tensor", "zero_stage", "micro_batch"),
    "accelerate": ("data", "zero_stage"),
}
"""Columns that the command and the files of a launcher say; the training script says the rest."""
PRECISIONS = {"torchtitan": ("bf16", "fp32", "fp8", "mxfp8")}
OPTIMIZERS = {"torchtitan": ("adamw", "adam"), "deepspeed": ("adamw", "adam", "lamb", "sgd")}
OFFLOADS = {"torchtitan": ("none", "parameters"), "accelerate": ("none", "none", "parameters")}


@st.composite
def recipe_settings(draw: st.DrawFn, launcher: str) -> LaunchSetting:
    """Return a plan with its job, for a launcher with a configuration."""
    powers = st.sampled_from([1, 1, 2, 4, 8])
    is_wide = launcher == "torchtitan"
    tensor, pipeline, context = (draw(powers) if is_wide else 1 for _ in range(3))
    tensor = draw(st.sampled_from([1, 2, 4])) if launcher == "deepspeed" else tensor
    data, micro, steps = draw(powers), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 3, 8]))
    stage = draw(st.sampled_from(STAGES[launcher]))
    # One replica shards nothing, and torchtitan's context ranks always shard.
    stage = 3 if context > 1 and not stage else stage if data * context > 1 else 0
    names = ("llama-3.1-8b", "qwen3-8b", "deepseek-v3") if is_wide else MODELS
    model = zoo.find_preset(draw(st.sampled_from(names)))
    mode = draw(st.sampled_from(["none", "selective", "full"] if is_wide else ["none", "full"]))
    plan = Plan(
        data=data, tensor=tensor, pipeline=pipeline, context=context, micro_batch=micro, gradient_accumulation=steps,
        zero_stage=stage, checkpointing=mode, sequence_parallel=tensor > 1 and is_wide,
        expert=draw(powers) if is_wide and zoo.count_experts(model) else 1,
        virtual_stages=draw(st.sampled_from([1, 2])) if pipeline > 1 else 1,
    )  # fmt: skip
    workload = Workload(
        model, 512, data * micro * steps, steps=draw(st.sampled_from([None, 100])),
        precision=draw(st.sampled_from(PRECISIONS.get(launcher, ("bf16", "fp16", "fp32", "tf32")))),
        optimizer=draw(st.sampled_from(OPTIMIZERS.get(launcher, ("adamw", "sgd")))),
        execution=draw(st.sampled_from(["eager", "compiled"])),
        offload=draw(st.sampled_from(OFFLOADS.get(launcher, ("none", "none", "optimizer", "parameters")))),
        shard_degree=draw(st.sampled_from([None, data // 2])) if is_wide and stage and data > 2 else None,
    )  # fmt: skip
    return LaunchSetting("job", workload, plan, "h100-sxm", max(1, plan.gpus // 8), min(8, plan.gpus), 1.0)


def check_recipe(launcher: str, setting: LaunchSetting, folder: Path) -> bool:
    """Check that a launch is read as its plan. Return whether the launcher wrote one."""
    launch = written(launcher, setting)
    if launch is None:
        return False
    (folder / "run.sh").write_text(launch.format_bash_script())
    found = readers.read_file(str(folder / "run.sh"), gpus=setting.plan.gpus, has_model=True)
    wanted, plan = setting.workload, setting.plan
    assert (found.unknown, dict(found.unpriced)) == ((), {})
    assert {name: getattr(found.plan, name) for name in STATED[launcher]} == {
        name: getattr(plan, name) for name in STATED[launcher]
    }
    if launcher == "accelerate":
        assert found.gpus == plan.gpus
    else:
        assert found.training["globalBatchSize"] == wanted.global_batch
        assert found.training["optimizer"] in (wanted.optimizer, *(["momentum"] if wanted.optimizer == "sgd" else []))
    if wanted.precision != "tf32" or launcher == "trainer":
        assert found.training["precision"] == wanted.precision
    assert (found.training.get("offload") or "none") == wanted.offload
    if launcher in ("torchtitan", "trainer", "accelerate"):
        assert (found.training.get("execution") == "compiled") == (wanted.execution == "compiled")
    if launcher in ("torchtitan", "trainer"):
        assert found.training.get("steps") == wanted.steps
    if launcher == "torchtitan":
        assert found.training.get("shardDegree") == (wanted.shard_degree if plan.zero_stage else None)
    return True


@pytest.mark.parametrize("launcher", STATED)
@pytest.mark.slow
def test_a_configuration_is_read_as_the_plan_that_was_written(launcher: str, tmp_path: Path) -> None:
    count = 0

    @given(recipe_settings(launcher))
    @settings(max_examples=60, deadline=None)
    def check(setting: LaunchSetting) -> None:
        nonlocal count
        count += check_recipe(launcher, setting, tmp_path)

    check()
    assert count > 3


@pytest.mark.long
@pytest.mark.parametrize("launcher", STATED)
def test_500_configurations_are_read_as_their_plans(launcher: str, tmp_path: Path) -> None:
    count = 0

    @given(recipe_settings(launcher))
    @settings(
        max_examples=700 if launcher == "deepspeed" else 1500,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    def check(setting: LaunchSetting) -> None:
        nonlocal count
        count += check_recipe(launcher, setting, tmp_path)

    check()
    assert count >= 500


@pytest.mark.parametrize("launcher", ["torchrun", "fsdp2"])
def test_a_script_that_says_the_plan_itself_is_refused(launcher: str) -> None:
    """The command says the GPUs alone; nothing of the plan is guessed."""
    count = 0

    @given(recipe_settings("trainer"))
    @settings(max_examples=60, deadline=None)
    def check(setting: LaunchSetting) -> None:
        nonlocal count
        launch = written(launcher, setting)
        if launch is None:
            return
        count += 1
        line = read_command(launch.command, "")
        assert line is not None and line.world == setting.plan.gpus
        with pytest.raises(SpecError, match=r"train\.py is no training script that is known"):
            readers.read_words(launch.command, has_model=True)

    check()
    assert count > 3


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


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--hybrid-layer-pattern M*M*", "hybrid layers are not read from a command"),
        ("--moe-flex-dispatcher-backend ncclep", "'ncclep' is not priced"),
        ("--main-grads-dtype bf16", "'bf16' is not priced"),
        ("--optimizer-offload-fraction 0.5", "'0.5' is not priced"),
        ("--step-batch-size-schedule 0:32", "a batch that grows is not priced"),
        ("--moe-latent-size 512", "experts in a latent space are not read from a command"),
    ],
)
def test_new_options_of_megatron_that_cost_are_refused(option: str, reason: str) -> None:
    words = f"{GPT} --vocab-size 32000 {option}".split()
    assert readers.read_words(words).unpriced == {option.split()[0]: reason}


def test_cuda_graphs_of_a_whole_iteration_are_read() -> None:
    words = f"{GPT} --vocab-size 32000 --cuda-graph-impl full_iteration --main-grads-dtype fp32".split()
    found = readers.read_words(words)
    assert (found.training["execution"], found.unpriced) == ("cudaGraphs", {})


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
        'T=${1:-2}\nif [[ "$T" == 2 ]] || [[ -z "$X" ]]; then A=(--lr 1); fi\n' + GPT.replace("size 2", "size $T"),
        'A=(--bf16)\nif [ -n "$KEY" ]; then\n  A+=(--wandb-project x)\nfi\n' + GPT.replace("--bf16", "${A[@]}"),
        "python -m " + GPT.replace("torchrun", "torch.distributed.run"),
    ],
)
def test_literal_variables_of_a_script_are_resolved(tmp_path: Path, text: str) -> None:
    assert script_plan(tmp_path, text) == ("dp=4,tp=2,mb=1", 8)


PLAIN = GPT.removeprefix("torchrun --nproc-per-node 8 ")
AGENTS = GPT.replace("--nproc-per-node 8", "--nnodes=8 --nproc_per_node=1")
NNODES_2 = GPT.replace("torchrun", "torchrun --nnodes 2")


def with_header(options: str, command: str) -> str:
    return "#!/bin/bash\n#SBATCH --job-name=x\n" + "".join(f"#SBATCH {one}\n" for one in options.split(";")) + command


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        (with_header("--nodes=2;--gpus-per-node=8;--ntasks-per-node=8", "srun python " + PLAIN), 16),
        (with_header("-N 2;--gres=gpu:h100:8 # all of them", "srun python " + PLAIN), 16),
        (with_header("-N2 --gres=gpu:8(S:0-1),nvme:1", "srun python " + PLAIN), 16),
        (with_header("--mail-type ALL --nodes 2;--gpus=16", "srun python " + PLAIN), 16),
        (with_header("-G h100:16", "srun python " + PLAIN), 16),
        (with_header("-N 2;-n 16;--gpus-per-task=1", "srun python " + PLAIN), 16),
        (with_header("-N 2;--gres=gpu:h100:8", "srun --ntasks-per-node=1 " + NNODES_2), 16),
        (with_header("-N 2;--gpus-per-node=8;--ntasks-per-node=8", "srun -n 2 --mem 0 " + NNODES_2), 16),
        (with_header("-N 2", GPT.replace("torchrun", "srun torchrun --nnodes=$SLURM_NNODES")), 16),
        (with_header("-N 4", GPT.replace("torchrun", "srun -N 1 -n 1 -w $node torchrun --nnodes 4")), 32),
        (with_header("-N 2-4;--gpus-per-node=8", GPT.replace("torchrun", "torchrun --nnodes 2")), 16),
        (with_header("-N {{ nodes }};--gres=gpu:8", GPT), 8),
        (with_header("-N 2;--ntasks-per-node=8", "srun -n 1 -w $node " + NNODES_2), 16),
        (with_header("-N 2;--ntasks-per-node=8", "srun --wait 60 -m block --ntasks-per-node=1 " + NNODES_2), 16),
        (with_header("-N 2;--tasks-per-node=4", "srun python " + PLAIN), 8),
        (with_header("--gpus=16;--gpus-per-node=8", "srun python " + PLAIN), 16),
        (with_header("-N 1,2,4;--gpus-per-node=8", NNODES_2), 16),
        (with_header("-N 2", "srun --gpus=0 python sft.py\n" + NNODES_2), 16),
        # How many of the job's nodes a loop's own srun is on says nothing about the launch.
        (with_header("-N 2", "srun -N 1 -n 1 " + GPT.replace("torchrun", "torchrun --nnodes=$COUNT")), 16),
        # The parts of a heterogeneous job have counts of their own.
        (with_header("-N 2;--gpus-per-node=8;hetjob;-N 1 -n 1", "srun --het-group=0 " + NNODES_2), 16),
        # Slurm reads no line behind the first command.
        (with_header("-N 2", NNODES_2 + "\n#SBATCH -N 4\n"), 16),
        ("#SBATCH -N 2\n##SBATCH -N 4\n" + NNODES_2, 16),
        # An agent of torchrun for each GPU.
        (with_header("-N 1;-n 8;--gpus-per-node=8", "srun " + AGENTS), 8),
        (with_header("-N 2;--ntasks-per-node=4;--gpus-per-node=4", "srun " + AGENTS), 8),
        (with_header("-N 8;--gpus-per-node=1", "srun " + AGENTS), 8),
        # A loop's own srun starts a job on each node.
        (with_header("-N 4", "srun -N 1 -n 1 -w $node " + GPT), 8),
        (
            with_header(
                "-N 2;-n 16;--gres=gpu:8", "srun python " + PLAIN + "--global-batch-size $((4 * SLURM_NTASKS))"
            ),
            16,
        ),
    ],
)
def test_nodes_and_gpus_of_slurm_are_read(tmp_path: Path, text: str, gpus: int) -> None:
    assert script_plan(tmp_path, text) == (f"dp={gpus // 2},tp=2,mb=1", gpus)


@pytest.mark.parametrize(
    "text",
    [
        with_header("-N 2-4;--gpus-per-node=8", GPT.replace("torchrun", "torchrun --nnodes $SLURM_NNODES")),
        with_header("--gpus-per-node=8", "srun -N 1 -n 1 " + GPT.replace("torchrun", "torchrun --nnodes $COUNT")),
        with_header("--gpus-per-node=8;hetjob;-N 1", "srun python " + PLAIN),
    ],
)
def test_a_number_of_nodes_that_is_open_is_not_guessed(text: str) -> None:
    assert find_launch(read_script(text, "job.sbatch")).world is None


def test_a_pasted_script_without_a_launch_is_named() -> None:
    with pytest.raises(SpecError) as caught:
        readers.read_words(["A=1\necho $A\n"])
    assert caught.value.field == "script"


def test_a_pasted_script_has_the_notes_of_its_file(tmp_path: Path) -> None:
    text = f"N=1\nsource env.sh\n{GPT}\n"
    (tmp_path / "job.sh").write_text(text)
    assert readers.read_words([text]).notes == readers.read_file(str(tmp_path / "job.sh")).notes != ()


@pytest.mark.parametrize(
    ("text", "field", "problem"),
    [
        (
            with_header("--gres=gpu:4;--gpus-per-node=8", GPT),
            "#SBATCH --gres",
            "is 4 GPUs a node, and --gpus-per-node is 8",
        ),
        (with_header("-N 3;--gpus=16", GPT), "#SBATCH --gpus", "16 GPUs are no multiple of 3 nodes"),
        (with_header("--nodes=four", GPT), "#SBATCH --nodes", "'four' is no count"),
        (with_header("--nodes=0", GPT), "#SBATCH --nodes", "'0' is no count"),
        (with_header("-N 2", GPT.replace("torchrun", "torchrun --nnodes=4")), "--nnodes", "says 4, and Slurm gives 2"),
        (with_header("-N 2", GPT), "torchrun", "runs on one node each without --nnodes, and Slurm gives 2 nodes"),
        (with_header("-N 2", "srun " + GPT), "torchrun", "runs on one node each without --nnodes"),
        (with_header("--gpus-per-node=4", GPT), "torchrun", "starts 8 processes a node, and Slurm gives 4 GPUs"),
        (
            with_header("-G 8", GPT.replace("torchrun", "torchrun --nnodes=2")),
            "torchrun",
            "starts 16 processes, and Slurm gives 8 GPUs",
        ),
        (with_header("--ntasks-per-node=8", "srun " + GPT), "torchrun", "srun starts it 8 times on each node"),
        (
            with_header("", "srun --ntasks-per-node=4 --gpus-per-node 8 python " + PLAIN),
            "srun",
            "starts 4 tasks on each",
        ),
    ],
)
def test_contradictions_to_slurm_are_refused(tmp_path: Path, text: str, field: str, problem: str) -> None:
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(SpecError) as caught:
        readers.read_file(str(tmp_path / "run.sh"))
    assert (caught.value.field.rpartition(": ")[2], problem in caught.value.problem) == (field, True), caught.value


def test_a_command_may_begin_with_srun() -> None:
    found = readers.read_words(f"srun -N 2 --ntasks-per-node=1 {NNODES_2}".split())
    assert (found.plan_text(), found.gpus, found.gpus_per_node) == ("dp=8,tp=2,mb=1", 16, 8)
    found = readers.read_words(f"srun -N 2 --gres=gpu:8 --ntasks-per-node 8 python {PLAIN}".split())
    assert (found.plan_text(), found.gpus) == ("dp=8,tp=2,mb=1", 16)
    with pytest.raises(SpecError, match="srun starts it 8 times on each node"):
        readers.read_words(f"srun --ntasks-per-node=8 {GPT}".split())


def test_a_sourced_file_may_change_values_that_are_set_before_it(tmp_path: Path) -> None:
    def notes(text: str) -> tuple[str, ...]:
        (tmp_path / "run.sh").write_text(text)
        return readers.read_file(str(tmp_path / "run.sh")).notes[1:]

    told = "is sourced and not read: it may change values that the script sets before it."
    before = f"TP=2\nsource conf/env.sh\nsource more.sh\n{GPT}--lr $TP"
    assert notes(before) == (f"conf/env.sh {told}",)
    assert notes(f"source env.sh\nTP=2\n{GPT}--lr $TP") == ()
    assert notes(f"TP=2\nsource venv/bin/activate\n{GPT}--lr $TP") == ()
    assert notes(with_header("-N 1", f"source env.sh\n{GPT}")) == ()


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
    words = [*GPT.replace("size 2", "size 8").split(), "--use-distributed-optimizer"]
    inputs = AdviceInputs(JobOptions(None, command=words), PoolOptions(gpus="h100-sxm:8"))
    advice = compute_advice(inputs).advice
    assert advice.baseline is not None
    assert str(advice.baseline.plan) == "zero1-dp1,tp8,mb1"
    assert advice.notes[-1].startswith("Change ")
    assert "as fast. " in advice.notes[-1]
    assert "--tensor-model-parallel-size 8 -> " in advice.notes[-1]


def test_a_plan_that_does_not_fit_is_told_what_to_change() -> None:
    inputs = AdviceInputs(JobOptions(None, command=GPT.split()), PoolOptions(gpus="h100-sxm:8"))
    advice = compute_advice(inputs).advice
    assert advice.baseline is None
    assert "add --use-distributed-optimizer" in advice.notes[-1]


FINE_TUNING = {
    "axolotl": "base_model: NousResearch/Meta-Llama-3-8B\nsequence_len: 4096\nmicro_batch_size: 2\nadapter: qlora\n"
    "lora_r: 32\nlora_target_linear: true\ngradient_accumulation_steps: 4\nbf16: auto\noptimizer: paged_adamw_8bit\n"
    "gradient_checkpointing: true\nfsdp:\n  - full_shard\n  - auto_wrap\n",
    "llamafactory": "model_name_or_path: meta-llama/Meta-Llama-3-8B\nstage: sft\nfinetuning_type: lora\nlora_rank: 32\n"
    "lora_target: all\nquantization_bit: 4\ncutoff_len: 4096\nper_device_train_batch_size: 2\nbf16: true\n"
    "gradient_accumulation_steps: 4\noptim: adamw_8bit\ndeepspeed: ds_z3_config.json\n",
    "torchtune": "model:\n  _component_: torchtune.models.llama3.qlora_llama3_8b\n  lora_rank: 32\n"
    "  apply_lora_to_mlp: true\nbatch_size: 2\ngradient_accumulation_steps: 4\ndtype: bf16\ntokenizer:\n"
    "  max_seq_len: 4096\noptimizer:\n  _component_: bitsandbytes.optim.PagedAdamW8bit\n  lr: 1.0\n"
    "enable_activation_checkpointing: true\n",
    "trainer": "model_name_or_path: meta-llama/Meta-Llama-3-8B\nper_device_train_batch_size: 2\nbf16: true\n"
    "gradient_accumulation_steps: 4\nmax_seq_length: 4096\nuse_peft: true\nlora_r: 32\nload_in_4bit: true\n"
    "lora_target_modules: all-linear\noptim: adamw_bnb_8bit\ngradient_checkpointing: true\nfsdp: full_shard\n",
}


FULL = (
    "model:\n  _component_: torchtune.models.llama3.llama3_8b\nbatch_size: 2\ndtype: bf16\ntokenizer:\n"
    "  max_seq_len: 4096\noptimizer:\n  _component_: bitsandbytes.optim.PagedAdamW8bit\n"
)


@pytest.mark.parametrize(
    ("more", "gpus", "reason"),
    [
        ("optimizer_in_bwd: true\ngradient_accumulation_steps: 1\n", 1, ""),
        ("optimizer_in_bwd: false\ngradient_accumulation_steps: 8\n", 1, ""),
        ("gradient_accumulation_steps: 8\n", 1, ""),
        ("optimizer_in_bwd: false\ngradient_accumulation_steps: 1\n", 8, ""),
        ("optimizer_in_bwd: true\ngradient_accumulation_steps: 1\n", 8, "on one GPU without accumulation alone"),
        ("optimizer_in_bwd: true\ngradient_accumulation_steps: 8\n", 1, "on one GPU without accumulation alone"),
        ("optimizer_in_bwd: true\noptimizer._component_: torch.optim.AdamW\n", 1, "with a paged optimizer alone"),
        ("optimizer_in_bwd: false\n", 1, "only the update within the backward pass is priced"),
        ("", 1, "only the update within the backward pass is priced"),
    ],
)
def test_an_update_within_the_backward_pass_is_priced_or_refused(
    more: str, gpus: int, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(FULL + more)
    options = JobOptions(str(tmp_path / "job.yaml"), gpus=gpus)
    if reason:
        with pytest.raises(SpecError, match=f"optimizer_in_bwd.*{reason}"):
            read_job(options)
    found = read_job(replace(options, lenient=bool(reason))).launch
    assert found is not None
    assert list(found.unpriced) == (["optimizer_in_bwd"] if reason else [])


@pytest.mark.parametrize("name", FINE_TUNING)
def test_recipes_of_equal_meaning_are_read_as_equal_jobs(name: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(FINE_TUNING[name])
    job = read_job(JobOptions(str(tmp_path / "job.yaml"), gpus=8))
    assert job.launch is not None
    assert job.launch.unknown == ()
    assert job.launch.plan_text() == "dp=8,zero=3,mb=2,ac=full"
    workload = job.request().workload
    assert (workload.model.name, workload.sequence_length, workload.global_batch) == ("llama-3-8b", 4096, 64)
    assert (workload.precision, workload.optimizer) == ("bf16", "adamw8bit")
    assert (workload.lora_rank, workload.lora_targets, workload.frozen_bits < 16) == (32, "all", True)


@pytest.mark.parametrize("component", ["lora_llama3_8b", "qlora_llama3_8b"])
@pytest.mark.parametrize("word", ["true", "false"])
def test_dora_of_torchtune_is_read(component: str, word: str, tmp_path: Path) -> None:
    text = FINE_TUNING["torchtune"].replace("qlora_llama3_8b", component)
    (tmp_path / "job.yaml").write_text(text.replace("  lora_rank: 32\n", f"  lora_rank: 32\n  use_dora: {word}\n"))
    workload = read_job(JobOptions(str(tmp_path / "job.yaml"), gpus=8)).request().workload
    assert (workload.lora_rank, workload.dora) == (32, word == "true")
    assert (workload.frozen_bits < 16) == component.startswith("qlora")


def test_dora_without_adapters_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(FULL.replace("llama3_8b\n", "llama3_8b\n  use_dora: true\n"))
    with pytest.raises(SpecError, match=r"use_dora.*without adapters"):
        read_job(JobOptions(str(tmp_path / "job.yaml"), gpus=8))


@pytest.mark.parametrize(("text", "whole"), [("[embed_tokens, lm_head]", True), ("", False), ("[]", False)])
def test_modules_that_axolotl_trains_whole_are_read(text: str, whole: bool, tmp_path: Path) -> None:
    """They were once ignored."""
    (tmp_path / "job.yaml").write_text(FINE_TUNING["axolotl"] + f"lora_modules_to_save: {text}\n")
    assert read_job(JobOptions(str(tmp_path / "job.yaml"), gpus=8)).request().workload.train_embeddings == whole


@pytest.mark.parametrize("text", ["[embed_tokens]", "[lm_head, norm]"])
def test_other_modules_trained_whole_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(FINE_TUNING["axolotl"] + f"lora_modules_to_save: {text}\n")
    with pytest.raises(SpecError, match=r"lora_modules_to_save: .*embed_tokens and lm_head together are priced"):
        read_job(JobOptions(str(tmp_path / "job.yaml"), gpus=8))


@pytest.mark.parametrize("word", ["true", "false"])
def test_dora_of_llamafactory_is_read(word: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(FINE_TUNING["llamafactory"] + f"use_dora: {word}\n")
    workload = read_job(JobOptions(str(tmp_path / "job.yaml"), gpus=8)).request().workload
    assert workload.dora == (word == "true")


def test_dora_of_litgpt_is_refused() -> None:
    values = {"lora_rank": 8, "dora": True, "framework": "litgpt", "seq": 512, "batch": 8}
    with pytest.raises(SpecError, match=r"litgpt has adapters of LoRA alone.*use framework torchtune or huggingface"):
        read_job(JobOptions("llama-3-8b", values=values)).request()


@pytest.mark.parametrize(("bits", "optimizer"), [(4, "adamw4bit"), (8, "adamw8bit"), (8, "adamw4bit")])
def test_axolotl_says_the_bits_of_weights_and_moments(bits: int, optimizer: str, tmp_path: Path) -> None:
    text = (
        FINE_TUNING["axolotl"]
        .partition("fsdp:")[0]
        .replace("qlora", "lora")
        .replace("paged_adamw_8bit", f"adamw_torch_{optimizer[5]}bit")
    )
    text += f"load_in_{bits}bit: true\nquantize_moe_experts: true\n"
    (tmp_path / "job.yaml").write_text(text)
    workload = read_job(JobOptions(str(tmp_path / "job.yaml"), gpus=8)).request().workload
    assert (workload.frozen_bits, workload.optimizer) == (bits, optimizer)


def test_relora_is_lora_between_its_merges(tmp_path: Path) -> None:
    added = "relora: true\nrelora_prune_ratio: 0.9\nrelora_cpu_offload: false\njagged_restart_steps: 150\n"
    (tmp_path / "job.yaml").write_text(FINE_TUNING["axolotl"] + added)
    found = readers.read_file(str(tmp_path / "job.yaml"), gpus=8)
    (tmp_path / "job.yaml").write_text(FINE_TUNING["axolotl"])
    plain = readers.read_file(str(tmp_path / "job.yaml"), gpus=8)
    assert (found.training, found.plan, found.unpriced, found.unknown) == (plain.training, plain.plan, {}, ())
    assert [note for note in found.notes if note not in plain.notes] == [
        "The adapters are merged into the weights now and then (relora), which is not priced."
    ]


WRAPPED = FINE_TUNING["torchtune"].replace("checkpointing: true", "checkpointing: false")


@pytest.mark.parametrize(
    ("text", "mode", "layers"),
    [
        (WRAPPED + "ac_mode: selective\nac_option: 2\n", "full", 16),
        (WRAPPED + "ac_mode: selective\nac_option: 0\n", "full", None),
        (WRAPPED + "ac_mode: selective\nac_option: 99\n", "none", None),
        (WRAPPED + "ac_mode: selective\nac_option: op\n", "selective", None),
        (WRAPPED + "ac_mode: full\n", "full", None),
        # The recipes take one of both.
        (FINE_TUNING["torchtune"] + "ac_mode: full\n", "none", None),
    ],
)
def test_layers_that_torchtune_wraps_are_read(text: str, mode: str, layers: int | None, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text)
    found = readers.read_file(str(tmp_path / "job.yaml"), gpus=8)
    assert (found.plan.checkpointing, found.training.get("recomputeLayers")) == (mode, layers)


def test_an_option_of_torchtune_that_wraps_no_layers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(WRAPPED + "ac_mode: selective\nac_option: some\n")
    with pytest.raises(SpecError, match=r"ac_option: 'some' is not read"):
        readers.read_file(str(tmp_path / "job.yaml"), gpus=8)


AXOLOTL = FINE_TUNING["axolotl"]


@pytest.mark.parametrize(
    ("text", "offloaded", "checkpointing"),
    [
        (AXOLOTL, None, "full"),
        # With adapters, offloading replaces recomputation, unless only its inputs leave or FSDP recomputes.
        (AXOLOTL + "activation_offloading: true\n", 1.0, "none"),
        (AXOLOTL.replace("checkpointing: true", "checkpointing: offload"), 1.0, "none"),
        (AXOLOTL + "activation_offloading: hidden_states\n", 1.0, "full"),
        (AXOLOTL.replace("gradient_checkpointing: true", "gradient_checkpointing: unsloth"), 1.0, "full"),
        (
            AXOLOTL + "activation_offloading: true\nfsdp_config:\n  activation_checkpointing: true\n",
            1.0,
            "full",
        ),
        (AXOLOTL.replace("adapter: qlora\n", "") + "activation_offloading: true\n", 1.0, "full"),
        (AXOLOTL + "activation_offloading: false\n", None, "full"),
        (FINE_TUNING["llamafactory"].partition("deepspeed")[0] + "use_unsloth_gc: true\n", 1.0, "full"),
        (FINE_TUNING["torchtune"] + "enable_activation_offloading: true\n", 1.0, "full"),
        (FINE_TUNING["trainer"] + "packing: true\nactivation_offloading: true\n", 1.0, "full"),
        (
            FINE_TUNING["trainer"].replace("checkpointing: true", "checkpointing: false")
            + "packing: true\nactivation_offloading: true\n",
            1.0,
            "none",
        ),
    ],
)
def test_offloaded_activations_are_read(text: str, offloaded: float | None, checkpointing: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text)
    found = readers.read_file(str(tmp_path / "job.yaml"), gpus=8)
    assert (found.training.get("offloadActivations"), found.plan.checkpointing) == (offloaded, checkpointing)
    assert not found.unpriced
    assert bool(found.notes) == (text.startswith("base_model") and checkpointing == "none")
    workload = read_job(JobOptions(str(tmp_path / "job.yaml"), gpus=8)).request().workload
    assert workload.offloaded_activations == (offloaded or 0.0)


def test_a_missing_file_of_deepspeed_is_known_by_the_launchers_own_names(tmp_path: Path) -> None:
    """The name of axolotl's zero2.json does not say that it keeps the optimizer on the host."""
    text = AXOLOTL.replace("fsdp:\n  - full_shard\n  - auto_wrap\n", "deepspeed: deepspeed_configs/zero2.json\n")
    (tmp_path / "job.yaml").write_text(text)
    found = readers.read_file(str(tmp_path / "job.yaml"), gpus=8)
    assert (found.plan.zero_stage, found.training["offload"]) == (2, "optimizer")
    (note,) = found.notes
    assert note.endswith("is not here: taken as axolotl's file of that name (ZeRO 2, optimizer on the host).")
    (tmp_path / "deepspeed_configs").mkdir()
    (tmp_path / "deepspeed_configs" / "zero2.json").write_text('{"zero_optimization": {"stage": 2}}')
    found = readers.read_file(str(tmp_path / "job.yaml"), gpus=8)
    assert (found.plan.zero_stage, found.training.get("offload"), found.notes) == (2, None, ())


@pytest.mark.parametrize(
    ("options", "degree"),
    [
        ("", None),
        ("dp_shard_size: 8\n", 8),  # two replicas are left over
        ("dp_shard_size: 4\ndp_replicate_size: 4\n", 4),
        ("dp_replicate_size: 2\n", 8),
        ("dp_shard_size: 16\n", None),
        ("dp_shard_size: 1\ndp_replicate_size: 1\n", None),
    ],
)
def test_ranks_that_shards_leave_over_are_replicas(options: str, degree: int | None, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(AXOLOTL + options)
    assert readers.read_file(str(tmp_path / "job.yaml"), gpus=16).training.get("shardDegree") == degree


@pytest.mark.parametrize(
    "text",
    [
        AXOLOTL + "dp_shard_size: 32\n",
        AXOLOTL + "dp_shard_size: 3\n",
        AXOLOTL + "dp_shard_size: 4\ndp_replicate_size: 2\n",
        FINE_TUNING["torchtune"] + "data_parallel_shard_dim: 8\n",
        FINE_TUNING["torchtune"] + "data_parallel_replicate_dim: 3\n",
    ],
)
def test_shards_and_replicas_are_the_ranks_of_the_job(text: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(SpecError, match="do not divide 16 data-parallel ranks"):
        readers.read_file(str(tmp_path / "job.yaml"), gpus=16)


def test_axolotl_may_state_the_samples_of_a_rank(tmp_path: Path) -> None:
    text = AXOLOTL.replace("gradient_accumulation_steps: 4", "batch_size: 6")
    (tmp_path / "job.yaml").write_text(text)
    assert readers.read_file(str(tmp_path / "job.yaml"), gpus=8).training["globalBatchSize"] == 48


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("a.yaml", FINE_TUNING["axolotl"] + "rl: grpo\n", "rl: 'grpo' is not priced"),
        ("a.yaml", FINE_TUNING["axolotl"] + "activation_offloading: legacy\n", "'legacy' is not priced"),
        (
            "a.yaml",
            FINE_TUNING["axolotl"].replace("gradient_checkpointing: true", "activation_offloading: true"),
            "activation_offloading: axolotl offloads activations only with gradient_checkpointing",
        ),
        (
            "a.yaml",
            FINE_TUNING["torchtune"].replace("activation_checkpointing", "activation_offloading"),
            "enable_activation_offloading: torchtune offloads activations only with enable_activation_checkpointing",
        ),
        (
            "a.yaml",
            FINE_TUNING["axolotl"] + "deepspeed: conf/zero3.json\n",
            "zero3.json: cannot be read, and a name is",
        ),
        (
            "a.yaml",
            FINE_TUNING["axolotl"] + "deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_params.json\n",
            "beside an optimizer on the GPU are not priced",
        ),
        ("a.yaml", FINE_TUNING["axolotl"] + "qat:\n  weight_dtype: int4\n", "quantization-aware training"),
        ("a.yaml", FINE_TUNING["axolotl"].replace("adapter: qlora\n", "") + "relora: true\n", "no adapters to merge"),
        ("a.yaml", FINE_TUNING["axolotl"] + "batch_size: 6\n", "batch_size: 6 is not 4 (accumulation) x 2"),
        ("a.yaml", FINE_TUNING["axolotl"] + "load_in_8bit: true\n", "QLoRA has weights in 4 bits"),
        ("a.yaml", FINE_TUNING["axolotl"].replace("qlora", "lora") + "load_in_8bit: true\n", "INT8 weights that ranks"),
        ("a.yaml", FINE_TUNING["axolotl"].replace("adapter: qlora", "load_in_4bit: true"), "without adapters are not"),
        ("a.yaml", FINE_TUNING["axolotl"].replace("4096", "long"), "'long' is no count"),
        ("a.yaml", FINE_TUNING["axolotl"].replace("base_model: ", "# "), "is not said by the launch"),
        ("a.yaml", FINE_TUNING["torchtune"].replace("llama3_8b", "llama9_8b"), "is no model that is known"),
        (
            "a.yaml",
            FINE_TUNING["llamafactory"].replace("ds_z3_config.json", "../../../etc/x.json"),
            "outside the folder",
        ),
        ("a.toml", "[training\n", "is not TOML"),
        ("a.toml", "[parallelism]\na = " + "[" * 99, "levels deep"),
        ("a.toml", "[parallelism]\na = " + "[\n" * 9999, "levels deep"),
        ("a.toml", "[parallelism]\n[training]\n" + "a." * 90 + "a = 1", "levels deep"),
        ("a.toml", "[parallelism]\ntensor_parallel_degree = 3\n[training]\n", "do not divide 8 GPUs"),
        ("a.toml", "[other]\nx = 1\n", "is of no launcher that is known"),
        ("a.yaml", "base_model: x\nmicro_batch_size: 1\nb: " + "x" * 2**20, "is neither a job"),
    ],
)
def test_bad_configurations_are_refused_in_one_line(tmp_path: Path, file: str, text: str, problem: str) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(SpecError) as caught:
        read_job(JobOptions(str(tmp_path / file), gpus=8))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_file_of_accelerate_counts_beside_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n"
        "  fsdp_activation_checkpointing: true\nmixed_precision: bf16\nnum_machines: 2\nnum_processes: 16\n"
    )
    command = "accelerate launch --config_file fsdp.yaml train.py --per_device_train_batch_size 2 --max_length 2048"
    found = readers.read_words(command.split(), has_model=True)
    assert (found.framework, found.gpus, found.plan_text()) == ("accelerate", 16, "dp=16,zero=2,mb=2,ac=full")
    assert found.training["precision"] == "bf16"


MAXTEXT = (
    "model_name: llama3.1-8b\nper_device_batch_size: 2\nmax_target_length: 4096\nici_fsdp_parallelism: 4\n"
    "ici_tensor_parallelism: 2\nremat_policy: full\ndtype: bfloat16\n"
)


def test_the_axes_of_maxtext_are_read(tmp_path: Path) -> None:
    """The samples of a device count also for those that share a sample."""
    path = tmp_path / "job.yml"
    path.write_text(MAXTEXT)
    found = readers.read_file(str(path), gpus=8)
    assert (found.plan_text(), found.training["globalBatchSize"]) == ("dp=4,tp=2,zero=3,sp=1,mb=4,ac=full", 16)
    command = f"python3 -m MaxText.train {path} ici_tensor_parallelism=1 dcn_data_parallelism=4"
    found = readers.read_words(command.split(), gpus=16)
    assert (found.plan_text(), found.training["globalBatchSize"]) == ("dp=16,zero=3,mb=2,ac=full", 32)
    assert found.training["shardDegree"] == 4
    path.write_text(MAXTEXT + "dcn_fsdp_parallelism: 3\n")
    with pytest.raises(SpecError, match="is not 8 GPUs"):
        readers.read_file(str(path), gpus=8)


def test_only_the_test_that_decides_a_chain_counts(tmp_path: Path) -> None:
    text = "T=2\nif [ $T = {} ] {} [ -n $X ]; then T=4; else T=1; fi\n" + GPT + "--tensor-model-parallel-size $T"
    for value, mark, degree in ((2, "||", 4), (3, "&&", 1)):
        assert f"tp={degree}," in script_plan(tmp_path, text.format(value, mark))[0] or degree == 1
    for value, mark in ((3, "||"), (2, "&&")):
        with pytest.raises(SpecError, match="not literal"):
            script_plan(tmp_path, text.format(value, mark))


@pytest.mark.parametrize(("options", "summed"), [("", "fp32"), ("--grad-reduce-in-bf16", "bf16")])
def test_a_megatron_command_in_fp8_says_how_gradients_are_summed(tmp_path: Path, options: str, summed: str) -> None:
    """Megatron-LM sums them in FP32 unless an option says otherwise, whatever Tilecast assumes of other jobs."""
    (tmp_path / "run.sh").write_text(f"{GPT} --micro-batch-size 1 --bf16 --fp8-format hybrid {options}\n")
    found = readers.read_file(str(tmp_path / "run.sh"), gpus=8)
    assert (found.training["precision"], found.training["gradientPrecision"]) == ("fp8", summed)


def test_megatron_arguments_of_a_yaml_file_are_read(tmp_path: Path) -> None:
    words = GPT.split()[4:]
    pairs = OptionTable.read("megatron").split_words(words)
    lines = [f"  {pair.option}: {pair.values[0] if pair.values else 'true'}" for pair in pairs]
    (tmp_path / "model_config.yaml").write_text("MODEL_ARGS:\n" + "\n".join(lines) + "\n  --micro-batch-size: 1\n")
    found = readers.read_file(str(tmp_path / "model_config.yaml"), gpus=8)
    assert (found.plan_text(), found.model) == ("dp=4,tp=2,mb=1", {"preset": "llama-3-8b"})


def test_python_reads_a_command_as_the_command_line_does() -> None:
    words = [*GPT.split(), "--use-distributed-optimizer"]
    by_command = compute_advice(AdviceInputs(JobOptions(None, command=words), PoolOptions(gpus="h100-sxm:8"))).advice
    advice = tilecast.advise(None, command=" ".join(words), gpus="h100-sxm:8")
    assert advice.to_dict()["baseline"]["parallelism"]["tensor"] == 2
    assert advice.to_dict()["notes"] == list(by_command.notes)


def read_degree(tmp_path: Path, text: str) -> str:
    """Return the tensor parallel degree of a script that ends in a launch line with $TP, or "unknown"."""
    try:
        plan, _ = script_plan(tmp_path, f"{text}\n" + GPT.replace("parallel-size 2", "parallel-size $TP"))
    except SpecError as error:
        assert "not literal" in str(error)
        return "unknown"
    return next((part[3:] for part in plan.split(",") if part.startswith("tp=")), "1")


@pytest.mark.parametrize(
    ("text", "degree"),
    [
        ('N=1; TP=2\n[ "$N" -gt 1 ] && TP=8', "2"),
        ('N=2; TP=2\n[ "$N" -gt 1 ] && TP=8', "8"),
        ('N=1; TP=2\n[ "$N" -gt 1 ] || TP=8', "8"),
        ('TP=2\n[ "$N" -gt 1 ] && TP=8', "unknown"),
        ('TP=2\n[ "$N" -gt 1 ] || TP=8', "unknown"),
        ('N=1; TP=2\ntest $N -gt 1 && { TP=4; }', "2"),
        ('N=2; TP=2\ntest $N -gt 1 && { TP=4; }', "4"),
        ('N=1; TP=2\n[[ $N == 1 ]] &&\n  # one node\n  TP=4', "4"),
        ('N=1; TP=2\n[ $N = 2 ] && TP=4 || TP=8', "8"),
        ('N=1; TP=2\n[ $N = 2 ] && [ $M = 1 ] && TP=8', "2"),
        ('N=1; TP=2\n[[ $N == 2 && $M == 1 ]] && TP=8', "2"),
        ('N=1; TP=2\n! [ $N = 2 ] && TP=8', "8"),
        ('N=1; TP=2\n((N > 1)) && TP=8', "2"),
        ('TP=2\ncd /tmp && TP=8', "8"),
        ('TP=2\ngrep -q H100 x && TP=8', "unknown"),
        ('TP=2\nsetup() { TP=8; }', "2"),
        ('TP=2\nfunction setup {\n  TP=8\n}\n', "2"),
        ('TP=2\nsetup() { TP=8; }\nsetup', "8"),
        ('TP=2\nsetup() { TP=${1:-4}; }\nsetup 8', "8"),
        ('TP=2\nmain() { TP=$1; }\nmain "$@"', "unknown"),
        ('TP=2\nmain() { TP=${1:-4}; }\nmain "$@"', "4"),
        ('TP=2\nsetup() { local TP=8; }\nsetup', "2"),
        ('TP=2\nsetup() { TP=8; }\nif [ $X ]; then setup; fi', "unknown"),
        ('TP=2\n(cd /tmp; TP=8)', "2"),
        ('TP=2\nif [ $X ]; then eval "TP=8"; fi', "unknown"),
        ('N=1; TP=2\nif [ $N = 1 ]; then :; elif [ $X ]; then TP=8; fi', "2"),
        ('N=1; TP=2\nif [ $N = 2 ] || [ $N = 1 ]; then TP=4; else TP=8; fi', "4"),
        ('TP=2\ncase $X in\n  a) TP=4 ;;\n  *) (cd x; y) ;;\nesac', "unknown"),
        ('TP=2\nfor ((i=0; i<3; i++)); do TP=4; done', "unknown"),
        ('TP=(2)\nTP[0]=4', "unknown"),
        ('TP=2\nif [ --5 -gt 1 ]; then TP=4; fi', "unknown"),
        ('. ./env.sh\nTP=${TP:-4}', "unknown"),
        ('source "$HOME/env.sh" && TP=${DEGREE-4}', "unknown"),
        ('if [ -f env.sh ]; then source env.sh; fi\nTP=${TP:-4}', "unknown"),
        ('setup() { source env.sh; }\nsetup\nTP=${TP:-4}', "unknown"),
        ('TP=${TP:-4}\nsource env.sh', "4"),
        ('TP=2\nsource env.sh\nTP=${TP:-4}', "2"),
        ('N=1\n[ $N = 2 ] && source env.sh\nTP=${TP:-4}', "4"),
        ('source /opt/venv/bin/activate\n. ~/conda/etc/profile.d/conda.sh\nTP=${TP:-4}', "4"),
        ('TP=2\nif [ ' + "9" * 5000 + ' -gt 1 ]; then TP=4; fi', "unknown"),
    ],
)  # fmt: skip
def test_a_branch_counts_only_if_it_runs(tmp_path: Path, text: str, degree: str) -> None:
    assert read_degree(tmp_path, text) == degree


@pytest.mark.parametrize(
    ("text", "launched"),
    [
        ("A=1\nA=2 torchrun $A\necho $A", [["torchrun", "1"], ["echo", "1"]]),
        ("f() { torchrun $A; }\nA=3\nA=4 f\ntorchrun $A", [["torchrun", "4"], ["torchrun", "3"]]),
        ("A=0\nA=1 bash -c 'torchrun $A'\ntorchrun $A", [["torchrun", "1"], ["torchrun", "0"]]),
        ("A=1; B=2 && torchrun $A $B", [["torchrun", "1", "2"]]),
        ("torchrun a\nexit 0\ntorchrun b", [["torchrun", "a"]]),
        ("if [ $# -lt 1 ]; then exit 1; fi\ntorchrun a", [["torchrun", "a"]]),
        ("(exit 1; torchrun a)\ntorchrun b", [["torchrun", "b"]]),
        ("f() { return; torchrun a; }\nf\ntorchrun b", [["torchrun", "b"]]),
        ("bash -c 'exit; torchrun a'\ntorchrun b", [["torchrun", "b"]]),
        ("f() { torchrun a; }\nexit", [["torchrun", "a"]]),
        ("cat x | exit 0\ntorchrun a", [["cat", "x"], ["torchrun", "a"]]),
        ("{ exit; } | cat\nf() { exit; }\n(f)\nf &\ntorchrun a", [["cat"], ["torchrun", "a"]]),
        ("f() { exit 0; torchrun a; }\ntorchrun b", [["torchrun", "b"]]),
        ("X=1\nif [[ $X == 1 && -n $X ]]; then torchrun a; else torchrun b; fi", [["torchrun", "a"]]),
        ("X=1\nif [[ ( $X == 2 || $X == 3 ) && $X ]]; then torchrun a; else torchrun b; fi", [["torchrun", "b"]]),
        ("X=1\nif [[ -z $X ||\n  ! $X -gt 1 ]]; then torchrun a; else torchrun b; fi", [["torchrun", "a"]]),
        ("[[ $U && x == y ]] && torchrun a\n[[ $U || x == x ]] && torchrun b", [["torchrun", "b"]]),
        ("X=7\n[ $X = 6 -o -z x ] && torchrun a\n[ $X = 7 -a -n x ] && torchrun b", [["torchrun", "b"]]),
        ("[[ a == a* ]] && torchrun a\n[[ b != b ]] || torchrun b", [["torchrun", "a"], ["torchrun", "b"]]),
        ("X=a\n[[ $X =~ ^(a|b)$ ]] && echo x\ntorchrun b", [["echo", "x"], ["torchrun", "b"]]),
        ("if [[ ! $X =~ ^(a |'b )'|\\)) && -n '' ]]; then torchrun a; fi\ntorchrun b", [["torchrun", "b"]]),
        ("[[ $X =~ [[:digit:]]+(\\.[0-9]+)? || a == a ]] || torchrun a\ntorchrun b", [["torchrun", "b"]]),
        ("[[ $X == @(a|b) ]] && echo x\ntorchrun b", [["echo", "x"], ["torchrun", "b"]]),
    ],
)
def test_ends_and_conditions_of_scripts_are_followed(text: str, launched: list[list[str]]) -> None:
    assert shell.read_script(text, "run.sh").commands == launched


def test_a_launch_in_a_function_or_a_subshell_is_found(tmp_path: Path) -> None:
    for text in ("train() {{\n{}\n}}\n$1\n", "train() {{\n{}\n}}\ntrain\n", "(cd x; {})\n", "[ $X = 1 ] && {}\n"):
        assert script_plan(tmp_path, text.format(GPT)) == ("dp=4,tp=2,mb=1", 8)


PAIRS = ("AB", "BC", "CD")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("A=aaa\n" + 40 * 'A="$A$A"\n', "4 MiB"),
        ("A=(a b)\n" + 40 * 'A=("${A[@]}" "${A[@]}")\n', "words"),
        ("A=" + 60_000 * "a" + "\n" + "B=${C:-" + 20_000 * "$A" + "}\n", "4 MiB"),
        ("A=a\n" + 30_000 * "if [ $X ]; then\n", "256 branches"),
        ("A=true\n" + "".join(f"{b}='" + 200 * f'eval "${a}";' + "'\n" for a, b in PAIRS) + 'eval "$D"', "20,000 c"),
        ("A() { :; }\n" + "".join(f"{b}() {{ " + 200 * f"{a};" + " }\n" for a, b in PAIRS) + "D", "20,000 c"),
        (60_000 * "A+=(x)\n", "20,000 c"),
        ('A="' + 8_000 * ("a" * 60 + "\n") + '"\n' + 10_000 * "A+=x\n", "4 MiB"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_script_that_expands_without_end_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "run.sh").write_text(text)
    tracemalloc.start()
    begin = time.process_time()
    with pytest.raises(SpecError, match=problem):
        readers.read_file(str(tmp_path / "run.sh"))
    seconds, peak = time.process_time() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 20
    assert peak < 2**27


def test_a_long_quotation_and_many_additions_are_read_in_linear_time(tmp_path: Path) -> None:
    text = (
        'A="'
        + 8_000 * ("a" * 60 + "\n")
        + '"\n'
        + 10_000 * "B+=(x)\n"
        + 'echo "'
        + "\\\n".join(["b" * 60] * 4_000)
        + '"\n'
    )
    begin = time.process_time()
    assert script_plan(tmp_path, text + GPT) == ("dp=4,tp=2,mb=1", 8)
    assert time.process_time() - begin < 10


@pytest.mark.parametrize(
    ("command", "field", "problem"),
    [
        ("torchrun", "command", "torchrun names no program"),
        ("torchrun --nnodes x a.py", "--nnodes", "'x' is no count"),
        (GPT + "--num-attention-heads 0", "--num-attention-heads", "0 is no count"),
        (GPT + "--num-layers-per-virtual-pipeline-stage 0", "--num-layers-per-virtual-pipeline-stage", "no count"),
        (GPT + "--micro-batch-size 0", "--micro-batch-size", "0 is no count"),
        (GPT + "--train-samples -5", "--train-samples", "-5 is no count"),
        (GPT + "--hidden-dropout nan", "--hidden-dropout", "'nan' is no number"),
        (GPT + "--num-experts 8 --moe-layer-freq [,]", "--moe-layer-freq", "is not read"),
        (GPT + "--num-experts 8 --moe-layer-freq [01]", "--moe-layer-freq", "is not read"),
        (GPT + "--num-experts 8 --moe-layer-freq 0", "--moe-layer-freq", "is not read"),
        (GPT + "--num-experts 8 --moe-layer-freq [" + "1," * 2000 + "1]*9999", "--moe-layer-freq", "is not read"),
    ],
)
def test_bad_commands_are_refused_in_one_line(command: str, field: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        readers.read_words(command.split())
    assert caught.value.field == field
    assert problem in caught.value.problem


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", FINE_TUNING["axolotl"] + "tensor_parallel_size: 0\n"),
        ("a.yaml", FINE_TUNING["axolotl"].replace("steps: 4", "steps: 0")),
        ("a.yaml", MAXTEXT.replace("fsdp_parallelism: 4", "fsdp_parallelism: 0")),
        ("a.toml", "[parallelism]\ndata_parallel_replicate_degree = 0\n[training]\n"),
    ],
)
def test_degrees_of_zero_are_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError, match="no count"):
        readers.read_file(str(tmp_path / name), gpus=8)


@pytest.mark.parametrize(
    ("words", "program", "nodes"),
    [
        ("accelerate launch --use_megatron_lm --megatron_lm_tp_degree 2 train.py", "train.py", None),
        ("accelerate launch --dynamo_use_dynamic train.py", "train.py", None),
        ("deepspeed --bind_cores_to_rank /job/train.py", "/job/train.py", None),
        ("deepspeed --bind_cores_to_rank train", "train", None),
        ("torchrun --no_such_flag --nnodes 2 train.py", "train.py", 2),
        ("torchrun --nnodes 1:4 --nproc-per-node 8 train.py", "train.py", 1),
    ],
)
def test_the_program_behind_options_of_a_launcher_is_found(words: str, program: str, nodes: int | None) -> None:
    line = read_command(words.split(), "")
    assert line is not None
    assert (line.program, line.nodes) == (program, nodes)


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1024, "vocab_size": 1000,
    "max_position_embeddings": 4096,
}  # fmt: skip
TRAINER = (
    "torchrun --nproc-per-node 8 train.py --per_device_train_batch_size 1 --max_seq_length 128 --model_name_or_path "
)


def test_the_model_of_a_script_is_read_within_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    for folder in (tmp_path / "job" / "own", tmp_path / "job" / "manifest", elsewhere, elsewhere / "own"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(
            json.dumps({**CONFIG, "num_hidden_layers": 4 if folder.name == "own" else 5})
        )
    (tmp_path / "job" / "manifest" / "config.json").write_text(
        '{"apiVersion": "tilecast.dev/v1", "kind": "TrainingJob"}'
    )
    (tmp_path / "job" / "link").symlink_to(elsewhere)
    (elsewhere / "own" / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 6}))
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(CONFIG)))

    def count_layers(model: str) -> int:
        (tmp_path / "job" / "run.sh").write_text(TRAINER + model)
        return read_job(JobOptions(str(tmp_path / "job" / "run.sh"))).request().workload.model.layers

    assert (count_layers("own"), count_layers("./own/config.json"), count_layers("/x/Llama-2-7b-hf")) == (4, 4, 32)
    outside = (
        str(elsewhere),
        str(elsewhere / "config.json"),
        "../elsewhere",
        "link",
        "-",
        "hf://a/b",
        "manifest",
        "run.sh",
    )
    for name in outside:
        with pytest.raises(SpecError, match=r"no preset|describes no model"):
            count_layers(name)


def test_a_pipe_is_no_job(tmp_path: Path) -> None:
    for name in ("run.sh", "job.yaml"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(SpecError, match="is no regular file"):
            read_job(JobOptions(str(tmp_path / name)))


def test_a_command_as_text_may_have_lines_and_a_broken_one_is_an_error() -> None:
    lines = GPT.replace(" --", " \\\n  --")
    assert launches.split_command(lines) == GPT.split()
    with pytest.raises(SpecError, match=r"^command: is no command: no closing quotation; paste the whole command$"):
        tilecast.advise(None, command="torchrun 'pretrain_gpt.py", gpus="h100-sxm:8")


RUN_CLM = (
    "torchrun --nproc_per_node 8 run_clm.py --model_name_or_path llama-3.1-8b --per_device_train_batch_size 1 "
    "--gradient_accumulation_steps 8 --bf16 --block_size 4096 --gradient_checkpointing --max_steps 1000 "
)
ZERO = '--deepspeed {"zero_optimization":{"stage":3}}'


def advise_command(words: list[str], **options: Any) -> Advice:
    return compute_advice(
        AdviceInputs(JobOptions(None, command=words), PoolOptions(gpus="h100-sxm:12"), **options)
    ).advice


@pytest.mark.parametrize("said", [ZERO, "--fsdp full_shard"])
def test_plans_for_a_trainer_command_are_plans_that_trainer_runs(said: str) -> None:
    """Pipelines were among the trade-offs of a Trainer command with DeepSpeed, which gives it the whole model."""
    advice = advise_command(RUN_CLM.split() + said.split())
    assert len(advice.pareto) > 2
    assert all(offer.plan.pipeline == offer.plan.expert == 1 for offer in (*advice.offers, *advice.pareto))


def test_a_deepspeed_script_of_ones_own_may_have_pipelines() -> None:
    words = [*RUN_CLM.replace("--model_name_or_path llama-3.1-8b", "").split(), "--deepspeed_config", ZERO.split()[1]]
    own = readers.read_words(words, has_model=True)
    assert (own.framework, readers.read_words(RUN_CLM.split() + ZERO.split()).framework) == (
        "deepspeed",
        "huggingface-deepspeed",
    )


def test_a_trainer_command_with_deepspeed_is_launched_by_trainer() -> None:
    advice = advise_command(RUN_CLM.split() + ZERO.split(), launch="trainer")
    assert advice.best is not None
    script = write_launch("trainer", LaunchSetting.from_offer("x", advice.best))
    assert script.command[-2:] == ["--deepspeed", "ds_config.json"]
    config = json.loads(script.files["ds_config.json"])
    assert config["zero_optimization"]["stage"] == advice.best.plan.zero_stage
    assert config["optimizer"]["params"]["lr"] == "auto"
    with pytest.raises(SpecError, match=r"accelerate is not written for .* use --launch deepspeed or trainer"):
        advise_command(RUN_CLM.split() + ZERO.split(), launch="accelerate")


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("--fsdp full_shard", "--fsdp full_shard -> shard_grad_op"),
        ('--fsdp full_shard --fsdp_config {"version":2}', "reshard_after_forward true -> false in --fsdp_config"),
        (ZERO, "zero_optimization.stage 3 -> 2"),
    ],
)
def test_a_change_of_the_zero_stage_has_the_name_of_the_launchers_option(said: str, change: str) -> None:
    reading = readers.read_words(RUN_CLM.split() + said.split())
    before = Plan(data=8, zero_stage=3)
    assert readers.list_changes(reading, before, replace(before, zero_stage=2)) == [change]


@pytest.mark.parametrize(
    ("stated", "change"),
    [("", "add --gradient_checkpointing false"), (" --gradient_checkpointing true", None)],
)
def test_a_default_that_is_on_is_switched_off_and_not_removed(stated: str, change: str | None) -> None:
    words = f"accelerate launch --num_processes 8 sft.py --per_device_train_batch_size 2{stated}".split()
    reading = readers.read_words(words, has_model=True)
    before = Plan(data=8, micro_batch=2, checkpointing="full")
    changes = readers.list_changes(reading, before, replace(before, checkpointing="none"))
    assert changes == [change or "--gradient_checkpointing true -> false"]


def test_changes_of_litgpt_name_no_options_of_lightning() -> None:
    command = "litgpt finetune_lora meta-llama/Meta-Llama-3-8B --devices 4 --train.micro_batch_size 2"
    reading = readers.read_words(command.split())
    before = Plan(data=4, micro_batch=2, zero_stage=3, gradient_accumulation=2, checkpointing="full")
    after = Plan(data=4, micro_batch=4, zero_stage=2, gradient_accumulation=1)
    assert sorted(readers.list_changes(reading, before, after)) == [
        "--train.micro_batch_size 2 -> 4", "checkpointing full -> none", "zero stage 3 -> 2",
    ]  # fmt: skip


def test_where_processes_meet_is_never_a_complaint() -> None:
    """`--master_port` whose value the shell computes once was "not known" among a script's own options."""
    meeting = "--master_port $MASTER_PORT --master-addr $MASTER_ADDR --node_rank $SLURM_NODEID --rdzv_id 7"
    text = f"MASTER_PORT=$((10000 + RANDOM % 1000))\nMASTER_ADDR=$(hostname)\n{TORCHRUN} {meeting} --my-own 1\n"
    found = readers.read_words([text], gpus=8, has_model=True)
    assert found.unknown == ("--my-own",)
