"""Advice of fewer GPUs, given where the last ones bring little."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from tilecast import zoo
from tilecast.advice import Request, advise
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.objectives import Objective
from tilecast.spec import Workload

H100 = find_gpu("h100-sxm")
POOL = Pool("h100", H100, 8, 64, find_link(H100.intra_link), find_link("efa-3200"), price_per_gpu_hour=6.88)
SMALL = Workload(zoo.find_preset("gpt2"), 1024, 512)


def notes(workload: Workload, pool: Pool = POOL, objective: Objective = "time") -> list[str]:
    advice = advise(Request("job", workload, objective), [pool])
    return [note for note in advice.notes if "x the time at" in note]


def test_gpus_that_cost_several_times_what_they_gain_are_told() -> None:
    (note,) = notes(SMALL)
    best = advise(Request("job", SMALL), [POOL]).best
    assert best is not None
    match = re.fullmatch(
        r"(Half|\d+) of the (?:\d+ )?GPUs take ([\d.]+) ms and ([\d.]+) USD per 1000 steps with (\S+), "
        r"instead of ([\d.]+) ms and ([\d.]+) USD per 1000 steps: "
        r"all \d* ?(?:of them )?take ([\d.]+)x the time at ([\d.]+)x the price\.",
        note,
    )
    assert match is not None
    slow, cheap, fast, dear, shorter, dearer = (float(match[place]) for place in (2, 3, 5, 6, 7, 8))
    few = best.gpus / 2 if match[1] == "Half" else float(match[1])
    assert 2 * few <= best.gpus
    assert shorter == pytest.approx(fast / slow, rel=0.02) and dearer == pytest.approx(dear / cheap, rel=0.02)
    assert dearer > shorter**-3
    alone = advise(Request("job", SMALL), [replace(POOL, max_nodes=int(few) // 8)]).best
    assert alone is not None and alone.step_s == pytest.approx(slow / 1e3, rel=0.1)


def test_gpus_that_earn_their_price_are_not() -> None:
    assert notes(Workload(zoo.find_preset("llama-3.1-8b"), 4096, 1024)) == []
    assert notes(SMALL, objective="cost") == []
    assert notes(SMALL, replace(POOL, max_nodes=1)) == []


@pytest.mark.slow
def test_gpus_are_compared_on_one_batch() -> None:
    request = Request("job", replace(SMALL, global_batch=448), batches=(336, 448))
    advice = advise(request, [POOL])
    (note,) = [note for note in advice.notes if "x the time at" in note]
    match = re.search(r"^(Half|\d+) of the .* take ([\d.]+) ms .* with (\S+), instead", note)
    assert match is not None and advice.best is not None
    shares = [int(share) for share in re.findall(r"(?:dp|mb)(\d+)", match[3])]
    assert advice.best.workload.global_batch % math.prod(shares) == 0
    few_gpus = advice.best.gpus // 2 if match[1] == "Half" else int(match[1])
    few = replace(POOL, max_nodes=few_gpus // 8)
    alone = advise(Request("job", advice.best.workload), [few]).best
    assert alone is not None and alone.step_s == pytest.approx(float(match[2]) / 1e3, rel=0.1)


def test_without_a_price_only_times_are_told() -> None:
    (note,) = notes(SMALL, replace(POOL, price_per_gpu_hour=None))
    assert "USD" not in note
