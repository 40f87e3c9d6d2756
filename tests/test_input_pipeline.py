"""The input pipeline: a stated rate of samples bounds the step, and advice says where it does."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast import zoo
from tilecast.cli import main
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.learning.calibration import Calibration
from tilecast.spec import Plan, Plans, Workload
from tilecast.step import StepTimes, step
from tilecast.step.blocks import kernel_seconds

JOB = Workload(zoo.find_preset("resnet-50"), 1, 2048, "fp16", optimizer="momentum", memory_format="channelsLast")
POOL = Pool("a100-40", find_gpu("a100-40"), 8, 2, find_link("nvlink3"), find_link("efa-400"))
PLANS = Plans.from_plans(Plan(data=1, micro_batch=128, gradient_accumulation=16), Plan(data=16, micro_batch=128))
WORDS = [
    "advise",
    "resnet-50",
    "--batch",
    "2048",
    "--gpus",
    "a100-40:16",
    "--precision",
    "fp16",
    "--plan",
    "dp=16,mb=128,zero=0,ac=none",
]


def times(rate: float | None) -> StepTimes:
    job = replace(JOB, input_samples_per_s=rate)
    sharded = zoo.build_sharded_graph(job, PLANS)
    return step(job, sharded, PLANS, POOL, kernel_seconds(job, sharded, POOL.gpu))


@given(st.floats(1.0, 1e6))
@pytest.mark.slow
def test_a_step_is_no_shorter_than_its_samples_take_and_no_longer_for_it(rate: float) -> None:
    free, bound = times(None), times(rate)
    delivered = 2048 / (np.array([1, 2]) * rate)  # one GPU of a node; sixteen of two nodes
    assert bound.total == pytest.approx(np.maximum(free.total, delivered))
    assert bound.total - bound.input == pytest.approx(free.total - free.input)


def test_a_correction_leaves_the_stated_rate_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def factors(*_: object) -> tuple[np.ndarray, np.ndarray]:
        return np.full(2, 0.5), np.ones(2)

    delivered = times(100.0)
    monkeypatch.setattr(Calibration, "corrections", (object(),), raising=False)
    monkeypatch.setattr(Calibration, "list_factors_by_gpus", factors)
    assert times(100.0).total == pytest.approx(delivered.total)
    assert (times(None).correction < 1).all()


@pytest.mark.parametrize(
    ("name", "reads"),
    [("resnet-50", True), ("vit-b-16", True), ("swin-t", True), ("mask-rcnn-r50-fpn", True), ("unet3d", True),
     ("gpt2-xl", False), ("deepspeech2", False), ("stable-diffusion-v2", False), ("dlrm", False)],
)  # fmt: skip
def test_models_of_images_are_told_from_others(name: str, reads: bool) -> None:
    assert zoo.reads_images(zoo.find_preset(name)) is reads


def advised(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*WORDS, *words, "-o", "json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.slow
def test_advice_warns_where_the_rate_bounds_the_step_or_comes_near(capsys: pytest.CaptureFixture[str]) -> None:
    free = advised(capsys)
    needed = 1024 / free["recommendation"]["stepSeconds"]["target"]
    (sentence,) = [note for note in free["notes"] if "--input-samples-per-second" in note]
    assert f"{float(f'{needed:.3g}'):,g} images/s" in sentence
    flag = "--input-samples-per-second"
    bound = advised(capsys, flag, f"{needed / 2}")
    assert bound["recommendation"]["bottleneck"] == "input"
    assert bound["recommendation"]["stepSeconds"]["target"] == pytest.approx(1024 / (needed / 2), rel=1e-5)
    sentence = f"each node could take {float(f'{needed:.3g}'):,g} samples/s and gets {float(f'{needed / 2:.3g}'):,g}."
    assert f"The input pipeline bounds the step: {sentence}" in bound["notes"]
    little = advised(capsys, flag, f"{needed * 0.9}")["recommendation"]
    assert little["breakdown"]["input"] < little["breakdown"]["compute"]
    assert (little["bottleneck"], little["reason"].partition("; ")[2]) == ("input", "bound by its input")
    near = advised(capsys, flag, f"{needed / 0.9}")
    assert near["recommendation"]["stepSeconds"] == free["recommendation"]["stepSeconds"]
    assert any(note.startswith("The step takes 90% of the ") for note in near["notes"])
    assert not any("input" in note for note in advised(capsys, flag, f"{needed * 2}")["notes"])


def test_text_has_no_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "gpt2-xl", "--seq", "1024", "--batch", "64", "--gpus", "a100-80:8", "-o", "json"]) == 0
    assert not any("input" in note for note in json.loads(capsys.readouterr().out)["notes"])


@pytest.mark.parametrize("rate", ["0", "-5", "nan", "inf"])
def test_a_rate_that_is_none_is_one_clear_line(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, f"--input-samples-per-second={rate}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tilecast: --input-samples-per-second: ")
