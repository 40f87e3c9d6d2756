"""A measured step beside its forecast: the line of the breakdown that is named as suspect, or none."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast import constants, search, zoo
from tilecast.cli import main
from tilecast.diagnose import PLAUSIBLE, diagnose_step
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.spec import Plan, Plans, Workload

T4 = find_gpu("t4")
POOL = Pool("t4", T4, 4, 2, find_link("pcie3"), find_link("ethernet-25"))
GPT = Workload(zoo.find_preset("gpt2"), 512, 64, precision="fp16")
PLAN = Plan(data=8, micro_batch=4, gradient_accumulation=2)
FORECAST = search.price(GPT, Plans.from_plans(PLAN), POOL)
TOTAL, PARTS = float(FORECAST.step_s[0]), FORECAST.times.parts(0)


@given(st.floats(min_value=0.2, max_value=5))
@settings(max_examples=25)
def test_a_line_that_took_what_it_would_have_to_makes_the_measurement(ratio: float) -> None:
    diagnosis = diagnose_step(GPT, PLAN, POOL, TOTAL * ratio)
    assert diagnosis.ratio == pytest.approx(ratio)
    assert diagnosis.is_in_range == (diagnosis.lower_s <= TOTAL * ratio <= diagnosis.upper_s)
    for one in diagnosis.suspects:
        assert TOTAL - one.forecast_s + one.needed_s == pytest.approx(TOTAL * ratio)
        assert math.isinf(one.standard_errors) == (one.needed_s <= 0)
    apart = [one.standard_errors for one in diagnosis.suspects]
    assert apart == sorted(apart)
    assert diagnosis.unstated.standard_errors == pytest.approx(
        abs(math.log(ratio))
        * PLAUSIBLE
        / constants.shipped_widths().unstated.get("decoder", constants.shipped_widths().unstated["other"]),
        abs=1e-9,
    )


def test_on_a_slow_network_a_long_step_is_the_networks_fault() -> None:
    """A third more communication lies within its own error; the same seconds of compute lie far outside."""
    measured = TOTAL + 0.3 * PARTS["communication"]
    diagnosis = diagnose_step(GPT, PLAN, POOL, measured)
    assert PARTS["communication"] > 0.2 * TOTAL
    assert diagnosis.suspects[0].line == "communication" and diagnosis.suspects[0].is_plausible


def test_with_one_gpu_the_network_is_no_suspect() -> None:
    plan = Plan(micro_batch=4, gradient_accumulation=16)
    diagnosis = diagnose_step(GPT, plan, POOL, 2 * float(search.price(GPT, Plans.from_plans(plan), POOL).step_s[0]))
    assert {one.line for one in diagnosis.suspects} == {"compute", "launch"}


def test_a_step_shorter_than_a_line_clears_that_line_of_being_all() -> None:
    diagnosis = diagnose_step(GPT, PLAN, POOL, 0.05 * TOTAL)
    assert not diagnosis.is_in_range
    assert any(math.isinf(one.standard_errors) for one in diagnosis.suspects)


JOB = ["advise", "gpt2", "--seq", "512", "--batch", "64", "--precision", "fp16", "--gpus", "t4:8"]


def test_the_screen_names_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--baseline", "t4:8", "--measured", "0.5"]) == 0
    screen = capsys.readouterr().out
    assert "Most probably off: " in screen and "IF ONLY THIS WERE OFF" in screen
    assert main([*JOB, "--plan", "dp=8", "--measured", "0.5", "-o", "json"]) == 0
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert measured["measuredSeconds"] == 0.5
    assert measured["suspects"][-1]["line"] == "unstated"


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--measured", "1"], "does not say of which GPUs and plan it is"),
        (["--measured", "0", "--plan", "dp=8"], "no step time"),
        (["--measured", "nan", "--plan", "dp=8"], "no step time"),
        (["--measured", "1", "--framework", "ddp", "--baseline", "t4:7"], "cannot be priced"),
    ],
)
def test_a_measurement_of_nothing_is_one_line(
    more: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*JOB, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tilecast: --measured: ") and problem in error and error.count("\n") == 1
