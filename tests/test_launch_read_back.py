"""What `--launch` prints, read back: attention, schedule, recomputation and dtypes are those that were priced.

A new choice is a row in `FACTS`: the name of a fact, its priced value, and for each launcher a reader of the printed
text. A launcher without a reader must not print the fact differently for different values (`test_launch_priced`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest

from test_launch_priced import JOBS, PLANS, WORKLOADS, base, setting
from tilecast.frameworks import FRAMEWORKS
from tilecast.render.launch import LAUNCHERS, write_launch
from tilecast.spec import Plan, SpecError, Workload

Reader = Callable[[str], object]
WIDTHS = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2}


def flag(name: str, default: object = None) -> Reader:
    """Return a reader of the value of a command-line option."""

    def read(text: str) -> object:
        found = re.search(rf"(?<!\S){name}(?:\s+(?!--)(\S+))?", text)
        return default if found is None else found[1] or True

    return read


def key(name: str, default: object = None) -> Reader:
    """Return a reader of a key of a TOML, YAML or JSON file, or of an argument in Python."""

    def read(text: str) -> object:
        found = re.search(rf'(?<![\w"])"?{name}"?\s*[:=]\s*([^,\n)]+)', text)
        return default if found is None else json.loads(found[1].replace("True", "true").replace("False", "false"))

    return read


def words(table: Mapping[str, object], default: object) -> Reader:
    """Return a reader that looks for the first of some words."""
    return lambda text: next((value for word, value in table.items() if word in text), default)


def number(read: Reader) -> Reader:
    return lambda text: int(str(read(text)))


def width(pattern: str, default: int) -> Reader:
    """Return a reader of the bytes of a dtype that a pattern captures."""

    def read(text: str) -> object:
        found = re.search(pattern, text)
        return default if found is None else WIDTHS[found[1]]

    return read


PYTHON_RECOMPUTES = words({"layer.attention.core.forward = ": "selective", "layer.forward = ": "full"}, "none")
PYTHON_ATTENTION = words(
    {
        "flash_attention_2": "flash",
        "FLASH_ATTENTION": "flash",
        'attn_implementation="eager"': "eager",
        "SDPBackend.MATH": "eager",
        "CUDNN_ATTENTION": "cudnn",
        "enable_mem_efficient_sdp(False)": "cudnn",
        "enable_cudnn_sdp(False)": "memoryEfficient",
        "EFFICIENT_ATTENTION": "memoryEfficient",
    },
    "auto",
)
HF_RECOMPUTES = words(
    {
        "layer.attention.core.forward = ": "selective",
        '"activation_checkpointing": true': "full",
        "fsdp_activation_checkpointing: true": "full",
        "--activation_checkpointing": "full",
        "--gradient_checkpointing": "full",
        "gradient_checkpointing_enable": "full",
    },
    "none",
)


def asked_attention(workload: Workload) -> str:
    """Return the attention that a command can ask for; which FlashAttention runs is what is installed."""
    return "flash" if workload.attention.startswith("flash") else workload.attention


FACTS: dict[str, tuple[Callable[[Workload, Plan], object], Mapping[str, Reader]]] = {
    "recomputation": (
        lambda workload, plan: plan.checkpointing,
        {
            "torchrun": PYTHON_RECOMPUTES,
            "fsdp2": PYTHON_RECOMPUTES,
            "deepspeed": words({"layer.attention.core.forward = ": "selective", "layer.forward = ": "full"}, "none"),
            "megatron": flag("--recompute-granularity", "none"),
            "accelerate": HF_RECOMPUTES,
            "trainer": HF_RECOMPUTES,
            "torchtitan": words({"=SelectiveAC.Config()": "selective", "=FullAC.Config()": "full"}, "none"),
        },
    ),
    "attention": (
        lambda workload, plan: asked_attention(workload),
        {
            "megatron": words(
                {
                    "--attention-backend flash": "flash",
                    "--attention-backend unfused": "eager",
                    "--attention-backend fused": "cudnn",
                },
                "auto",
            ),
        },
    ),
    "pipeline": (
        lambda workload, plan: (plan.pipeline, plan.virtual_stages),
        {
            "megatron": lambda text: (
                int(str(flag("--pipeline-model-parallel-size", 1)(text))),
                int(str(flag("--num-virtual-stages-per-pipeline-rank", 1)(text))),
            ),
            "torchtitan": lambda text: (
                key("pipeline_parallel_degree")(text),
                2 if '"Interleaved1F1B"' in text else 1,
            ),
        },
    ),
    "degrees": (
        lambda workload, plan: (plan.tensor, plan.context),
        {
            "megatron": lambda text: (
                int(str(flag("--tensor-model-parallel-size", 1)(text))),
                int(str(flag("--context-parallel-size", 1)(text))),
            ),
            "torchtitan": lambda text: (key("tensor_parallel_degree")(text), key("context_parallel_degree")(text)),
        },
    ),
    "micro-batch": (
        lambda workload, plan: plan.micro_batch,
        {
            "torchrun": number(key("batch_size")),
            "fsdp2": number(key("batch_size")),
            "deepspeed": number(key("train_micro_batch_size_per_gpu")),
            "megatron": number(flag("--micro-batch-size")),
            "trainer": number(flag("--per_device_train_batch_size")),
            "accelerate": number(key("batch_size")),
        },
    ),
}


def runs(launcher: str) -> Iterator[tuple[str, Workload, Plan, str]]:
    """Yield the printed text of every framework, workload and plan that a launcher accepts, with what was priced."""
    for framework in LAUNCHERS[launcher].frameworks:
        for job in JOBS.values():
            settings = [(replace(job, **one), base(launcher)) for one in WORKLOADS]  # type: ignore[arg-type]
            settings += [(job, replace(base(launcher), **one)) for one in PLANS]  # type: ignore[arg-type]
            for workload, plan in settings:
                priced = replace(workload, framework=framework)
                try:
                    line = write_launch(launcher, setting(priced, plan))
                except SpecError:
                    continue
                yield framework, priced, plan, "\n".join([" ".join(line.command), *line.files.values(), *line.script])


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_is_printed_is_what_was_priced(launcher: str) -> None:
    count = 0
    for _, workload, plan, text in runs(launcher):
        for name, (priced, readers) in FACTS.items():
            if launcher in readers:
                assert readers[launcher](text) == priced(workload, plan), (name, plan, text)
                count += 1
    assert count > 10 or launcher not in {name for _, readers in FACTS.values() for name in readers}


GRADIENTS: Mapping[str, Reader] = {
    "fsdp2": width(r"reduce_dtype=torch\.(\w+)", 4),
    "deepspeed": width(r'"grad_accum_dtype": "(\w+)"', 4),
    "torchtitan": width(r'mixed_precision_reduce="(\w+)"', 4),
    "megatron": lambda text: 4 if "--accumulate-allreduce-grads-in-fp32" in text else 2,
}
"""Bytes of a gradient, as each launcher prints them for a job in 16 bits."""


@pytest.mark.parametrize("launcher", GRADIENTS)
def test_gradients_are_printed_as_wide_as_they_were_priced(launcher: str) -> None:
    for framework, workload, _, text in runs(launcher):
        if workload.is_mixed and not workload.lora_rank:
            wide = FRAMEWORKS[framework].has_fp32_gradients(workload)
            assert GRADIENTS[launcher](text) == (4 if wide else 2), (framework, workload.precision, text)


@pytest.mark.parametrize("launcher", ["torchrun", "fsdp2", "deepspeed", "accelerate", "trainer"])
def test_attention_of_a_script_is_printed_as_priced(launcher: str) -> None:
    for _, workload, _, text in runs(launcher):
        if workload.model.family == "decoder":
            assert PYTHON_ATTENTION(text) == asked_attention(workload), text


def test_the_readers_tell_choices_apart() -> None:
    assert flag("--a-b", 1)("x --a-b 4 --c") == "4" and flag("--c", 1)("x --a-b 4 --c") is True
    assert key("micro")('{"micro": 3,}') == 3 and key("mode")('mode = "full"\n') == "full"
    assert PYTHON_RECOMPUTES("layer.forward = f") == "full" and PYTHON_RECOMPUTES("") == "none"
    assert width(r"x=torch\.(\w+)", 4)("x=torch.bfloat16") == 2
