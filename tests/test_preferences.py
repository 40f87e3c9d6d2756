"""Losses on preferences: two sequences a sample, a frozen reference model, and rewards in place of logits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilecast import memory, search, step, zoo
from tilecast.advice import Request, advise
from tilecast.advice.enumeration import count_run_steps
from tilecast.api.training_job import TrainingJobSpec, read_request, to_request, training_job_document
from tilecast.cli import main
from tilecast.graph import Graph, Shards
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.inputs.job import read_job
from tilecast.inputs.job_options import JobOptions
from tilecast.render.launch import LAUNCHERS, LaunchSetting, write_launch
from tilecast.render.table import advice_headline
from tilecast.spec import LOSSES, PREFERENCE_FRAMEWORKS, Plan, Plans, SpecError, Workload
from tilecast.step import blocks, weights
from tilecast.zoo import preferences
from tilecast.zoo.modules import is_repeated_in_full

LLAMA = Workload(zoo.find_preset("llama-3-8b"), 2048, 64, framework="huggingface")
POOL = Pool("h100-sxm", find_gpu("h100-sxm"), 8, 2, find_link("nvlink4"), find_link("infiniband-ndr-8x400"))
PARAMETERS = 8_030_261_248.0


def shards(micro: int) -> Shards:
    one = np.ones(1, np.int64)
    return Shards(micro * one, one, one, one, sequence_parallel=0 * one)


def list_kernels(graph: Graph, phase: str, prefix: str = "") -> Counter[tuple[object, ...]]:
    """Return how often each kernel runs in a pass, by name without the prefix. With a prefix, others are left out."""
    found: Counter[tuple[object, ...]] = Counter()
    for block in graph.blocks:
        for op in block.ops:
            is_extra = op.name.startswith(("reference.", "own-pass."))
            if op.phase == phase and (op.name.startswith(prefix) if prefix else not is_extra):
                table = op.table
                key = (op.name.removeprefix(prefix), int(table.kind[0]), int(table.precision[0]), *table.dims[0])
                found[key] += int(op.count * block.repeat)  # type: ignore[call-overload]
    return found


def price(workload: Workload, plan: Plan) -> tuple[float, memory.Footprint]:
    plans = Plans.from_plans(plan)
    sharded = zoo.build_sharded_graph(workload, plans)
    times = step.step(workload, sharded, plans, POOL, blocks.kernel_seconds(workload, sharded, POOL.gpu))
    return float(times.total[0]), memory.footprint(workload, sharded, plans, POOL.gpu)


def test_without_a_loss_nothing_is_adapted() -> None:
    graph = zoo.build(LLAMA, shards(1))
    assert preferences.add_forward_passes(LLAMA, graph) is graph
    whole = shards(2)
    job, same = preferences.adapt_to_loss(LLAMA, whole)
    assert job is LLAMA
    assert same is whole
    assert LLAMA.preference.sequences == 1
    assert weights.count_forward_gathers(LLAMA) == 0


@pytest.mark.parametrize("loss", ["orpo", "simpo", "cpo"])
def test_a_pair_is_two_sequences(loss: Any) -> None:
    pair, two = zoo.build(replace(LLAMA, loss=loss), shards(3)), zoo.build(LLAMA, shards(6))
    for phase in ("forward", "backward"):
        assert list_kernels(pair, phase) == list_kernels(two, phase)
    assert pair.host_bytes_per_sample == 2 * two.host_bytes_per_sample
    assert replace(LLAMA, loss=loss).tokens_per_step == 2 * LLAMA.tokens_per_step


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
@pytest.mark.parametrize("adapters", [{}, {"lora_rank": 16}, {"lora_rank": 16, "frozen_bits": 4}])
def test_the_reference_model_runs_forward_without_adapters(loss: Any, adapters: dict[str, Any]) -> None:
    job = replace(LLAMA, loss=loss, **adapters)
    graph = zoo.build(job, shards(1))
    trained, frozen = list_kernels(graph, "forward"), list_kernels(graph, "forward", "reference.")
    assert frozen == Counter({key: count for key, count in trained.items() if not str(key[0]).startswith("lora.")})
    assert any(str(key[0]).startswith("lora.") for key in trained) == bool(adapters)
    assert not list_kernels(graph, "backward", "reference.")
    without = zoo.build(replace(job, precomputed_reference=True), shards(1))
    assert not list_kernels(without, "forward", "reference.")
    assert list_kernels(without, "backward") == list_kernels(graph, "backward")


def test_kto_reads_mismatched_answers_in_both_models() -> None:
    """TRL, trainer/kto_trainer.py: _compute_kl_logps of the model, and of the reference beside its own pass."""
    graph = zoo.build(replace(LLAMA, loss="kto", lora_rank=16), shards(4))
    plain = zoo.build(replace(LLAMA, lora_rank=16), shards(4))
    trained = list_kernels(graph, "forward")
    assert trained == list_kernels(plain, "forward")
    assert list_kernels(graph, "forward", "own-pass.") == trained
    reference = list_kernels(graph, "forward", "reference.")
    base = {key: count for key, count in trained.items() if not str(key[0]).startswith("lora.")}
    assert reference == Counter({key: 2 * count for key, count in base.items()})


def test_a_reward_model_beside_trained_embeddings_has_no_copy_of_logits() -> None:
    job = replace(LLAMA, loss="reward", lora_rank=8)
    plain, whole = (zoo.build(replace(job, train_embeddings=one), shards(1)).last[0] for one in (False, True))
    assert whole.parameters.tolist() == plain.parameters.tolist()


def test_a_reward_model_has_one_output() -> None:
    graph, plain = zoo.build(replace(LLAMA, loss="reward"), shards(1)), zoo.build(LLAMA, shards(2))
    lost = plain.last[0].parameters - graph.last[0].parameters
    hidden, vocab = LLAMA.model.hidden, LLAMA.model.vocab
    assert lost[0] == hidden * vocab - hidden - 1
    assert [block.parameters for block in graph.layers] == [block.parameters for block in plain.layers]
    logits = next(op for op in graph.last[0].ops if op.name == "head.logits" and op.phase == "forward")
    assert logits.table.dims[0, 1:4].tolist() in ([2, 1, hidden], [1, 2, hidden])
    assert not list_kernels(graph, "forward", "reference.")


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_forward_passes_without_gradients_are_not_recomputed(mode: Any) -> None:
    """A step of DPO takes a forward pass more than one of ORPO, and the reference's host waits at most once."""
    plan = Plan(data=8, micro_batch=2, gradient_accumulation=4, checkpointing=mode)
    orpo, dpo = (price(replace(LLAMA, loss=loss), plan)[0] for loss in ("orpo", "dpo"))  # type: ignore[arg-type]
    passes = {"none": 3.0, "selective": 3.0, "full": 4.0}[mode]
    assert 1 + 0.7 / passes < dpo / orpo < 1 + 1.2 / passes
    for name in ("reference.attention.core", "own-pass.mlp.up"):
        assert not is_repeated_in_full(replace(LLAMA, loss="dpo"), name)
    torchtitan = replace(LLAMA, framework="torchtitan", loss="dpo")
    op = next(op for op in zoo.build(torchtitan, shards(1)).layers[0].ops if op.name.startswith("reference."))
    assert blocks.recomputed_fraction(torchtitan)(op) == 0


def test_a_precomputed_reference_takes_neither_time_nor_memory() -> None:
    plan = Plan(data=8, micro_batch=1, gradient_accumulation=8, checkpointing="full", zero_stage=3)
    job = replace(LLAMA, framework="accelerate")
    (one_s, one), (two_s, two) = (
        price(replace(job, **given), plan)  # type: ignore[arg-type]
        for given in ({"loss": "dpo", "precomputed_reference": True}, {"loss": "orpo"})
    )
    assert one_s == two_s
    assert one.items(0) == two.items(0)


@pytest.mark.parametrize(
    ("framework", "stage", "bytes_each"),
    [
        ("huggingface", 0, 4.0),  # FP32 beside autocast
        ("huggingface-deepspeed", 2, 2.0),  # whole below ZeRO 3, in 16 bits
        ("huggingface-deepspeed", 3, 2.0 / 8),
        ("accelerate", 3, 4.0 / 8),  # FP32 shards
        ("accelerate", 2, 4.0 / 8 + 2.0),  # and never sharded again
        ("torchtune", 3, 2.0 / 8),
    ],
)
def test_the_reference_model_is_held_beside_the_trained_one(framework: Any, stage: int, bytes_each: float) -> None:
    job = replace(LLAMA, framework=framework, loss="dpo")
    plan = Plan(data=8, micro_batch=1, gradient_accumulation=8, zero_stage=stage, checkpointing="full")
    held = [price(replace(job, precomputed_reference=one), plan)[1].parameters[0] for one in (False, True)]
    assert held[0] - held[1] == pytest.approx(bytes_each * PARAMETERS, rel=1e-6)
    adapters = replace(job, lora_rank=16)
    held = [price(replace(adapters, precomputed_reference=one), plan)[1].parameters[0] for one in (False, True)]
    assert held[0] == held[1]


def test_copies_of_autocast_for_the_reference_exist_beside_the_trained_ones() -> None:
    """They take the place of those that recomputed layers would have cached."""
    for mode, copies in (("none", 2.0), ("full", 0.0)):
        plan = Plan(data=8, micro_batch=1, gradient_accumulation=8, checkpointing=mode)  # type: ignore[arg-type]
        job = replace(LLAMA, loss="dpo", sequence_length=64)
        own, without = (price(replace(job, precomputed_reference=one), plan)[1] for one in (False, True))
        more = (own.activations + own.working)[0] - (without.activations + without.working)[0]
        assert more <= copies * PARAMETERS * 1.001
        assert (more > 0.5 * copies * PARAMETERS) == (mode == "none")


@pytest.mark.parametrize(("stage", "gathers"), [(0, 0), (3, 3)])
def test_each_forward_pass_gathers_sharded_weights(stage: int, gathers: int) -> None:
    job = replace(LLAMA, framework="accelerate", loss="dpo")
    plans = Plans.from_plans(Plan(data=8, zero_stage=stage))
    assert weights.count_gathers_per_micro_batch(job, plans).tolist() == [gathers]


SPEC: dict[str, Any] = {
    "model": {"preset": "llama-3-8b"},
    "training": {"sequenceLength": 1024, "globalBatchSize": 64, "loss": "dpo"},
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_spec_states_the_loss(loss: str) -> None:
    spec = {**SPEC, "training": {**SPEC["training"], "loss": loss, "tokens": 2**20}}
    workload = to_request("job", TrainingJobSpec.model_validate(spec)).workload
    assert (workload.loss, workload.precomputed_reference) == (loss, False)
    assert workload.steps == 2**20 // workload.tokens_per_step


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"preset": "t5-large"}}, "dpo trains decoders without encoders"),
        ({"training": {"framework": "megatron"}}, "the framework is megatron; use framework ddp"),
        ({"training": {"framework": "deepspeed", "offload": "parameters"}}, "not priced with weights on the host"),
        ({"training": {"loss": "orpo", "precomputedReference": True}}, "only the losses dpo, ipo and kto have"),
        ({"training": {"loss": "kto", "microBatchSize": 1}}, "microBatchSize is 1"),
        ({"training": {"pipelineSchedule": "1f1b"}}, "not priced in a pipeline"),
        ({"training": {"fusedLoss": True}}, "fusedLoss: is of the model's own loss"),
        ({"training": {"lossChunks": 4}}, "lossChunks: is of the model's own loss"),
        ({"training": {"loss": "grpo"}}, "dpo"),
        ({"workload": "inference"}, "dpo trains, and the workload is inference"),
    ],
)
def test_losses_that_nobody_prices_are_refused(changes: dict[str, Any], message: str) -> None:
    spec = {**SPEC, **changes, "training": {**SPEC["training"], **changes.get("training", {})}}
    with pytest.raises((SpecError, ValueError), match=message):
        to_request("job", TrainingJobSpec.model_validate(spec))


@pytest.mark.parametrize("framework", [None, "deepspeed"])
def test_no_plan_of_a_loss_has_a_pipeline(framework: Any) -> None:
    job = replace(LLAMA, loss="dpo", framework=framework)
    own = search.enumerate_plans(replace(job, loss=None), POOL)
    plans = search.enumerate_plans(job, POOL)
    assert own.pipeline.max() > 1 and plans.pipeline.max() == 1 and len(plans)
    able = [search.find_framework_features(name) for name in PREFERENCE_FRAMEWORKS]
    assert np.any([one.executes(plans) for one in able], axis=0).all()


def test_answers_of_kto_are_in_micro_batches_of_several() -> None:
    plans = search.enumerate_plans(replace(LLAMA, loss="kto"), POOL)
    assert len(plans) and plans.micro_batch.min() == 2
    assert search.enumerate_plans(replace(LLAMA, loss="dpo"), POOL).micro_batch.min() == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--loss", "dpo", "--plan", "pp=2", "--framework", "deepspeed"], "pp=2 is a pipeline"),
        (["--loss", "kto", "--plan", "mb=1"], "loss kto compares the answers of one micro-batch, and none has 2"),
        (["--loss", "dpo", "--precision", "fp8", "--framework", "deepspeed"], "deepspeed has no fp8"),
    ],
)
def test_pinned_plans_of_a_loss_that_nobody_prices_are_refused(settings: list[str], message: str, capsys: Any) -> None:
    words = ["llama-3.2-1b", "--seq", "1024", "--batch", "16", "--gpus", "h100-sxm:8", *settings]
    assert main(["advise", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_no_launch_is_printed_that_would_train_another_loss(launcher: str) -> None:
    job = replace(LLAMA, loss="dpo", framework=None)
    setting = LaunchSetting("job", job, Plan(data=16, micro_batch=1, gradient_accumulation=4), "h100-sxm", 2, 8, 1.5)
    with pytest.raises(SpecError, match=r"--launch: .*preferences \(loss dpo\); use TRL"):
        write_launch(launcher, setting)


AXOLOTL = """base_model: meta-llama/Meta-Llama-3-8B-Instruct
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_bnb_8bit
bf16: auto
gradient_checkpointing: true
"""
FACTORY = """model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
do_train: true
cutoff_len: 2048
per_device_train_batch_size: 2
bf16: true
"""
TUNE = """model:
  _component_: torchtune.models.llama3_1.llama3_1_8b
tokenizer:
  max_seq_len: 1024
batch_size: 4
optimizer:
  _component_: torch.optim.AdamW
loss:
  _component_: torchtune.rlhf.loss.DPOLoss
  beta: 0.05
ref_checkpointer:
  checkpoint_dir: /tmp/model
dtype: bf16
"""


def read(text: str, folder: Path) -> Workload:
    (folder / "job.yaml").write_text(text)
    job = read_job(JobOptions(str(folder / "job.yaml"), gpus=8))
    assert job.launch is not None
    assert job.launch.unknown == ()
    assert any("Log-probabilities" in note for note in job.launch.notes) == (job.request().workload.loss is not None)
    return job.request().workload


def test_a_lenient_reading_of_a_loss_leaves_a_fused_one_out(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"{AXOLOTL}rl: dpo\ncut_cross_entropy: true\n")
    options = JobOptions(str(tmp_path / "job.yaml"), gpus=8, lenient=True)
    workload = read_job(options).request().workload
    assert (workload.loss, workload.fused_loss) == ("dpo", False)
    with pytest.raises(SpecError, match="a fused loss is not priced for the loss dpo"):
        read_job(replace(options, lenient=False)).request()


@pytest.mark.parametrize(
    ("text", "loss", "is_precomputed"),
    [
        (f"{AXOLOTL}rl: dpo\nrl_beta: 0.1\n", "dpo", False),
        (f"{AXOLOTL}rl: ipo\nprecompute_ref_log_probs: true\n", "ipo", True),
        (f"{AXOLOTL}rl: orpo\norpo_alpha: 0.1\n", "orpo", False),
        (f"{AXOLOTL}rl: simpo\n", "simpo", False),
        (f"{AXOLOTL}rl: kto\nkto_desirable_weight: 0.2\n", "kto", False),
        (f"{AXOLOTL}reward_model: true\nnum_labels: 1\n", "reward", False),
        (f"{AXOLOTL}rl:\nreward_model: false\n", None, False),
        (f"{FACTORY}stage: dpo\nfinetuning_type: full\npref_beta: 0.1\n", "dpo", False),
        (f"{FACTORY}stage: dpo\nfinetuning_type: lora\npref_loss: orpo\n", "orpo", False),
        (f"{FACTORY}stage: dpo\nfinetuning_type: lora\npref_loss: kto_pair\n", "dpo", False),
        (f"{FACTORY}stage: kto\nfinetuning_type: lora\n", "kto", False),
        (f"{FACTORY}stage: sft\nfinetuning_type: lora\npref_loss: orpo\n", None, False),
        (TUNE, "dpo", False),
    ],
)
def test_recipes_state_the_loss(text: str, loss: str | None, is_precomputed: bool, tmp_path: Path) -> None:
    workload = read(text, tmp_path)
    assert (workload.loss, workload.precomputed_reference) == (loss, is_precomputed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{AXOLOTL}rl: grpo\n", "rl: 'grpo' is not priced"),
        (f"{AXOLOTL}rl: dpo\nreward_model: true\n", "leave one of them out"),
        (f"{AXOLOTL}rl: dpo\nliger_fused_linear_cross_entropy: true\n", "liger.*is not priced for the loss dpo"),
        (f"{AXOLOTL}rl: dpo\ndpo_use_liger_kernel: true\n", "Liger's losses on preferences"),
        (f"{AXOLOTL}rl: dpo\nadapter: lora\nrl_adapter_ref_model: true\n", "reference model beside adapters"),
        (f"{AXOLOTL}reward_model: true\nnum_labels: 2\n", "num_labels: .*rewards of one number"),
        (f"{AXOLOTL}num_labels: 2\n", "num_labels: "),
        (AXOLOTL.replace("size: 2", "size: 1") + "rl: kto\n", "KTO needs two answers"),
        (f"{FACTORY}stage: rm\nfinetuning_type: lora\n", "stage: 'rm' is not priced"),
        (f"{FACTORY}stage: dpo\nfinetuning_type: lora\nref_model: gpt2\n", "another model as the reference"),
        (f"{FACTORY}stage: dpo\nfinetuning_type: lora\npref_loss: magic\n", "pref_loss: 'magic' is not priced"),
        (TUNE.replace("DPOLoss", "RSOLoss"), "RSOLoss' is not priced"),
    ],
)
def test_recipes_of_losses_that_nobody_prices_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        read(text, tmp_path)


TRL = ("--model_name_or_path", "meta-llama/Llama-3.1-8B", "--per_device_train_batch_size", "2")


@pytest.mark.parametrize(
    ("program", "options", "loss"),
    [
        ("trl sft", (), None),
        ("trl dpo", ("--beta", "0.1"), "dpo"),
        ("trl dpo", ("--loss_type", "ipo"), "ipo"),
        ("trl dpo", ("--loss_type", "sigmoid", "sft"), "dpo"),
        ("trl kto", (), "kto"),
        ("trl reward", (), "reward"),
        ("accelerate launch trl/scripts/dpo.py", ("--precompute_ref_log_probs",), "dpo"),
        ("torchrun --nproc-per-node 8 examples/scripts/orpo.py", (), "orpo"),
        ("python examples/scripts/cpo.py", ("--loss_type", "simpo"), "simpo"),
        ("python run_dpo.py", (), "dpo"),
    ],
)
def test_methods_of_trl_are_read(program: str, options: tuple[str, ...], loss: str | None) -> None:
    """All of them were once read as supervised fine-tuning."""
    job = read_job(JobOptions(None, command=(*program.split(), *TRL, *options), gpus=8))
    workload = job.request().workload
    assert workload.loss == loss
    assert workload.precomputed_reference == ("--precompute_ref_log_probs" in options)
    assert workload.sequence_length == 1024


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        ("trl grpo", (), "TRL's grpo is not priced; give one of sft, dpo"),
        ("python examples/scripts/grpo.py", (), "TRL's grpo is not priced"),
        ("python run_grpo.py", (), "TRL's grpo is not priced"),
        ("trl kto", ("--loss_type", "apo_zero_unpaired"), "loss_type: 'apo_zero_unpaired' of kto is not priced"),
        ("trl dpo", ("--use_liger_kernel",), "use_liger_kernel: a fused loss is not priced for the loss dpo"),
        ("trl dpo", ("--sync_ref_model",), "a reference model that follows"),
        ("trl sft", ("--precompute_ref_log_probs",), "precomputed-reference: .*only the losses dpo"),
    ],
)
def test_methods_of_trl_that_nobody_prices_are_refused(program: str, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_job(JobOptions(None, command=(*program.split(), *TRL, *options), gpus=8)).request()


def test_a_file_of_trl_is_read_with_the_command_that_names_its_method(tmp_path: Path, monkeypatch: Any) -> None:
    text = "model_name_or_path: meta-llama/Llama-3.1-8B\nper_device_train_batch_size: 2\nmax_length: 512\nbeta: 0.2\n"
    (tmp_path / "job.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    workload = read_job(JobOptions(None, command=("trl", "dpo", "--config", "job.yaml"), gpus=8)).request().workload
    assert (workload.loss, workload.sequence_length) == ("dpo", 512)
    with pytest.raises(SpecError, match="beta: the file does not say which of TRL's methods reads it"):
        read_job(JobOptions("job.yaml", gpus=8))


def test_a_run_of_tokens_has_the_steps_of_pairs() -> None:
    training = {"globalBatchSize": 8, "sequenceLength": 128, "precision": "bf16", "tokens": 2048 * 100, "loss": "dpo"}
    request = read_request(training_job_document("job", {"model": {"preset": "llama-3.2-1b"}, "training": training}))
    assert count_run_steps(request, 8) == request.workload.steps == 100


@pytest.mark.parametrize(
    ("loss", "text"), [("dpo", " tokens/step in 64 pairs"), ("reward", " in 64 pairs"), ("kto", "")]
)
def test_the_first_line_of_advice_says_that_a_sample_is_a_pair(loss: Any, text: str) -> None:
    first = advice_headline(advise(Request("x", replace(LLAMA, loss=loss, lora_rank=16)), [POOL]))
    assert text in first
    assert ("pairs" in first) == bool(text)
    assert "pairs" not in advice_headline(advise(Request("x", LLAMA), [POOL]))
