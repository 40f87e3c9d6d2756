"""Choice of the implementation of fused attention, and its cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tilecast import constants, frameworks, kernels, zoo
from tilecast.cli import main
from tilecast.frameworks import FRAMEWORKS
from tilecast.graph import KernelTable, Op, Shards
from tilecast.hardware import find_gpu
from tilecast.spec import ATTENTIONS, Workload
from tilecast.step.blocks import find_fused_attention, operator_seconds


def workload(**facts: object) -> Workload:
    return Workload(zoo.find_preset("gpt2-xl"), 1024, 8, **{"precision": "fp16", **facts})  # type: ignore[arg-type]


SHIPPED = constants.shipped_constants()


@pytest.mark.parametrize(
    ("gpu", "facts", "name"),
    [
        ("v100-sxm", {}, "memoryEfficient"),
        ("t4", {"fused_kernels": True}, "memoryEfficient"),
        ("a100-80", {}, "flash2"),
        ("a100-80", {"framework": "megatron"}, "flash2"),
        ("h100-sxm", {"framework": "megatron"}, "cudnn"),
        ("h100-sxm", {"framework": "megatron", "framework_version": "0.5"}, "flash2"),
        ("l40s", {}, "flash2"),
        ("h100-sxm", {}, "cudnn"),
        ("gb300", {}, "flash2"),
        ("h100-sxm", {"framework": "ddp", "framework_version": "2.9"}, "flash2"),
        ("h100-sxm", {"framework": "ddp", "framework_version": "2.11"}, "cudnn"),
        ("h100-sxm", {"fused_kernels": True}, "cudnn"),
        ("h100-sxm", {"execution": "xla"}, "cudnn"),
        ("gb300", {"framework": "nemo"}, "cudnn"),
        ("b200", {"framework": "torchtitan"}, "cudnn"),
        ("b200", {"framework": "torchtitan", "framework_version": "2.7"}, "flash2"),
        ("h100-sxm", {"framework": "torchtitan"}, "flash2"),
        ("h100-sxm", {"framework": "composer"}, "flash1"),
        ("h100-sxm", {"attention": "flash"}, "flash2"),
        ("h100-sxm", {"attention": "flash", "framework": "nemo"}, "flash3"),
        ("h100-sxm", {"attention": "flex"}, "flex"),
        ("h100-sxm", {"precision": "fp32"}, "memoryEfficient"),
        ("v100-sxm", {"attention": "flash2"}, None),
        ("b200", {"attention": "flash3"}, None),
    ],
)
def test_a_gpu_and_its_framework_decide_what_runs(gpu: str, facts: dict[str, str], name: str | None) -> None:
    library = find_fused_attention(workload(**facts), find_gpu(gpu), SHIPPED)
    assert (library.name if library else None) == name


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_library_that_a_framework_tries_is_known_and_can_be_named(framework: str) -> None:
    cells = FRAMEWORKS[framework]
    assert {choice.library for choice in (*cells.attention, *cells.flash)} <= set(SHIPPED.attention)
    assert set(SHIPPED.attention) == set(ATTENTIONS) - {"auto", "flash", "eager"}


def test_a_library_that_a_gpu_lacks_rejects_its_pool(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["advise", "gpt2-xl", "--seq", "1024", "--batch", "64", "--attention", "flash3", "-o", "csv"]
    assert main([*job, "--gpus", "h100-sxm:8,a100-80:8"]) == 0
    assert "AttentionNotSupported: no kernels of FlashAttention-3" in capsys.readouterr().out


@pytest.mark.slow
def test_a_bare_model_says_which_attention_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["advise", "gpt2-xl", "--seq", "1024", "--batch", "64", "--gpus"]
    said = []
    for more in (
        ["h100-sxm:8"],
        ["a100-80:8"],
        ["h100-sxm:8", "--framework", "nemo"],
        ["h100-sxm:8", "--attention", "cudnn"],
    ):
        assert main([*job, *more]) == 0
        said.append("attention by cuDNN" in " ".join(capsys.readouterr().out.split()))
    assert said == [True, False, False, False]


def test_megatron_and_nemo_have_kernels_of_their_own() -> None:
    own = {name for name in FRAMEWORKS if frameworks.has_fused_kernels(workload(framework=name))}
    assert own == {"megatron", "nemo", "megatron-deepspeed"}
    assert not frameworks.has_fused_kernels(workload(framework="nemo", fused_kernels=False))


@pytest.mark.parametrize(
    ("name", "phase", "times"),
    [
        ("h100-sxm", "forward", 1.9),
        ("h100-sxm", "backward", 1.75),
        ("b200", "forward", 3.8),
        ("gb300", "backward", 3.5),
        ("rtx-5090", "forward", 1.0),
    ],
)
def test_an_operator_takes_as_much_longer_as_its_implementation(name, phase, times):
    gpu = find_gpu(name)
    dims = {"batch": 8, "heads": 25, "kv_heads": 25, "seq_q": 1024, "seq_kv": 1024, "head_dim": 64, "causal": 1}
    op = Op(
        "attention",
        KernelTable.from_dimensions("attention", "fp16", **dims, backward=float(phase == "backward")),
        phase,
    )
    priced = kernels.predict_kernel_times(op.table, gpu)
    rows = np.arange(1)
    torch, own = (operator_seconds(workload(attention=kind), op, priced, rows) for kind in ("flash2", "cudnn"))
    assert torch == pytest.approx(times * own)


def test_the_first_flash_attention_uses_hopper_as_little_as_the_second() -> None:
    first, second = SHIPPED.attention["flash1"], SHIPPED.attention["flash2"]
    for phase in ("forward", "backward"):
        on = {gpu: first.time_factor(find_gpu(gpu), phase) for gpu in ("a100-80", "h100-sxm")}
        assert on["a100-80"] > 1
        assert on["h100-sxm"] / on["a100-80"] == pytest.approx(second.time_factor(find_gpu("h100-sxm"), phase))


@pytest.mark.parametrize("name", ["h100-sxm", "a100-80", "b200"])
def test_context_ranks_attend_as_fast_as_sequences_of_their_own_length(name: str) -> None:
    """Ring attention reads the keys of one rank after the other, so a longer ring uses a GPU no better."""
    gpu, job = find_gpu(name), Workload(zoo.find_preset("llama-3.1-8b"), 131072, 1, "bf16")
    one = np.ones(1, dtype=np.int64)

    def attend(sequence: int, context: int) -> tuple[float, float]:
        """Return the FLOPs and the seconds of the attention of a layer."""
        graph = zoo.build(replace(job, sequence_length=sequence), Shards(one, one, one * context, one, one * 0))
        ops = [op for op in graph.layers[0].ops if op.name.startswith("attention") and op.selective]
        return (
            sum(float(op.table.flops()[0]) for op in ops),
            sum(float(kernels.predict_kernel_times(op.table, gpu).seconds[0]) for op in ops),
        )

    (alone, alone_s), (ring, ring_s) = attend(8192, 1), attend(131072, 16)
    assert ring == pytest.approx(16 * alone)
    assert ring_s == pytest.approx(16 * alone_s, rel=0.1)
