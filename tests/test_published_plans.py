"""The largest published runs by the plan and the recipe that their papers state: they fit, and steps are near."""

from __future__ import annotations

import json

import pytest

from tilecast.cli import main

RUNS = {
    # The Llama 3 paper, section 3.3.2: tensor 8, pipeline 16, data 128 with sharded gradients and optimizer states and
    # whole weights, an interleaved schedule, no recomputation; table 4: 16M tokens at 400 TFLOP/s a GPU.
    "llama": (
        [
            *("llama-3.1-405b", "--seq", "8192", "--batch", "2048", "--precision", "bf16", "--execution", "compiled"),
            *("--gpus", "h100-sxm:16384", "--plan", "tp=8,sp,pp=16,dp=128,vp=8,mb=1,zero=2"),
        ],
        6.5,
        0.2,
    ),
    # arXiv 2412.19437, section 3.2: pipeline 16, expert 64, ZeRO 1, exchanges beside another micro-batch, norms and MLA
    # up-projections computed again; 3.3: outputs of SwiGLU too, moments in BF16, gradients in FP32.
    "deepseek": (
        [
            *("deepseek-v3", "--seq", "4096", "--batch", "15360", "--precision", "fp8", "--framework", "megatron"),
            *("--expert-dispatch", "deepEP", "--expert-overlap", "microBatch", "--moment-precision", "bf16"),
            *("--gradient-precision", "fp32", "--recompute-modules", "layernorm,mla_up_proj,moe_act"),
            *("--gpus", "h800-sxm:2048", "--plan", "pp=16,dp=128,ep=64,mb=1,zero=1"),
        ],
        19.9,
        0.3,
    ),
}
"""Arguments of each run, its step in seconds as published, and the largest error of the forecast."""


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.slow
def test_a_published_plan_fits_and_takes_about_as_long(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, published_s, error = RUNS[name]
    assert main(["advise", *arguments, "-o", "json"]) == 0
    offer = json.loads(capsys.readouterr().out)["recommendation"]
    assert offer["stepSeconds"]["target"] == pytest.approx(published_s, rel=error)
    assert offer["memoryBytes"]["used"] < offer["memoryBytes"]["available"]


def test_whole_gradients_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the shards of FP32 gradients the run of Llama 3 is too large for its GPUs."""
    arguments = [text.replace("zero=2", "zero=1") for text in RUNS["llama"][0]]
    assert main(["advise", *arguments]) == 3
    assert "ZeRO stage 1 -> 2" in capsys.readouterr().out
