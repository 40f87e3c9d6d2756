"""Advice is ranked, explained and deterministic; reviewed copies of it are kept as files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tilecast import memory, nodes, uncertainty, zoo
from tilecast.advice import Baseline, Constraints, Request, advise, choose
from tilecast.advice.choose import rank_choices
from tilecast.advice.pricing import find_candidates
from tilecast.api import documents, training_job
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.objectives import OBJECTIVES
from tilecast.render.document import FORMATS, advice_json
from tilecast.spec import SpecError, Workload
from tilecast.zoo import huggingface

ROOT = Path(__file__).resolve().parent.parent


def pool(gpu: str, count: int, price: float | None = 2.0) -> Pool:
    facts = find_gpu(gpu)
    link = find_link("infiniband-hdr-8x200")
    return Pool(facts.name, facts, 8, count // 8, find_link(facts.intra_link), link, price_per_gpu_hour=price)


POOLS = [pool("h100-sxm", 16, 6.9), pool("a100-80", 32, 3.4), pool("l4", 16, 0.8), pool("t4", 32, 0.5)]
LLAMA = Request("llama", Workload(zoo.find_preset("llama-3.1-8b"), 8192, 128))


def test_every_pool_is_an_offer_or_a_rejection() -> None:
    advice = advise(LLAMA, POOLS)
    assert {offer.pool.name for offer in advice.offers} | {item.pool for item in advice.rejections} == {
        item.name for item in POOLS
    }
    assert {item.code for item in advice.rejections} == {"PrecisionNotSupported"}


def test_offers_are_ranked_by_the_objective() -> None:
    by_time = [offer.step_s for offer in advise(LLAMA, POOLS).offers]
    assert by_time == sorted(by_time)
    by_cost = [offer.cost_per_1000_steps for offer in advise(replace(LLAMA, objective="cost"), POOLS).offers]
    assert None not in by_cost
    assert by_cost == sorted(by_cost)  # type: ignore[type-var]


def test_cheapest_is_never_dearer_than_fastest() -> None:
    fastest, cheapest = (advise(replace(LLAMA, objective=goal), POOLS).best for goal in ("time", "cost"))
    assert fastest is not None and cheapest is not None
    # Of plans that tie, the simplest is shown.
    tied = math.exp(uncertainty.largest_tie_width())
    assert cheapest.cost_per_1000_steps <= fastest.cost_per_1000_steps * tied  # type: ignore[operator]
    assert fastest.step_s <= cheapest.step_s * tied


def test_same_inputs_same_bytes_whatever_the_order() -> None:
    assert advice_json(advise(LLAMA, POOLS)) == advice_json(advise(LLAMA, POOLS[::-1]))


def test_an_offer_adds_up() -> None:
    for offer in advise(LLAMA, POOLS).offers:
        assert sum(offer.breakdown.values()) == pytest.approx(offer.step_s)
        assert sum(offer.memory.values()) == pytest.approx(offer.memory_bytes)
        assert offer.lower_s < offer.step_s < offer.upper_s
        assert offer.memory_bytes <= offer.memory_available_bytes
        assert offer.plan.gpus == offer.gpus


def test_among_ties_a_tight_plan_loses_to_one_with_memory_to_spare() -> None:
    candidates = find_candidates(LLAMA, pool("h100-sxm", 16))
    eligible = candidates.fits
    usable = memory.usable_bytes(candidates.pool.gpu)

    def chosen(tight: int | slice) -> choose.Choice:
        upper = np.full(len(candidates), 0.6 * usable)
        upper[tight] = 1.05 * usable
        choice = choose.choose_plan(LLAMA, replace(candidates, upper_bytes=upper), eligible)
        assert choice is not None
        return choice

    roomy, crowded = chosen(slice(0, 0)), chosen(slice(None))
    assert roomy.row == crowded.row, "where none has memory to spare the simplest is shown"
    second = chosen(roomy.row)
    assert roomy.ties, "this job has plans that tie"
    assert second.value <= roomy.best * choose.MOST_BEHIND
    assert second.is_tight or second.row != roomy.row
    elsewhere = replace(crowded, candidates=replace(crowded.candidates, pool=pool("a100-80", 16)))
    assert rank_choices(LLAMA, [elsewhere, roomy]).choices[0] is roomy


@pytest.mark.parametrize(("roomy_value", "wins"), [(1.019, True), (1.021, False)])
def test_memory_to_spare_decides_before_the_wait_for_a_slow_host(roomy_value: float, wins: bool) -> None:
    value = np.array([1.0, roomy_value])
    traits = choose._ComparedColumns(
        value=value,
        slow=np.array([1.0, 1.08]),
        tight=np.array([True, False]),
        cost=value,
        seconds=value,
        counterpart=value,
        simplicity=(np.array([0, 1]),),
    )
    chosen, decision = choose._choose_among(traits, np.arange(2))
    assert (chosen, decision) == ((1, "memory") if wins else (0, "best"))


def test_however_many_plans_tie_the_same_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(
        "small", Workload(zoo.find_preset("llama-2-7b"), 4096, 1)
    )  # the host bounds the step, however the job is split
    candidates = find_candidates(request, pool("h100-sxm", 64))
    few = choose.choose_plan(request, candidates, candidates.fits)
    monkeypatch.setattr(choose, "MAX_TIED", 10**6)
    every = choose.choose_plan(request, candidates, candidates.fits)
    assert few is not None and every is not None
    assert len(every.details.rows) > len(few.details.rows)
    assert few.row == every.row


def test_no_price_means_no_cost() -> None:
    advice = advise(LLAMA, [pool("h100-sxm", 16, None)])
    assert advice.best is not None
    assert advice.best.cost_per_1000_steps is None
    assert "costPer1000Steps" not in json.loads(advice_json(advice))["recommendation"]


def test_baseline_is_priced_on_the_gpus_it_names() -> None:
    advice = advise(replace(LLAMA, baseline=Baseline("a100-80", 8)), POOLS)
    assert advice.baseline is not None
    assert advice.baseline.gpus == 8
    assert advice.best is not None
    assert advice.best.step_s < advice.baseline.step_s


def test_limits_hold_and_the_uncapped_choice_is_shown() -> None:
    advice = advise(replace(LLAMA, constraints=Constraints(max_gpus=8)), POOLS)
    assert all(offer.gpus <= 8 for offer in advice.offers)
    assert advice.uncapped is not None and advice.best is not None
    assert advice.uncapped.gpus > 8
    assert advice.uncapped.step_s < advice.best.step_s


def test_gpus_that_do_not_fill_nodes_are_refused() -> None:
    halves = advise(replace(LLAMA, constraints=Constraints(gpus=12)), POOLS).best
    assert halves is not None and (halves.nodes, halves.gpus_per_node) == (3, 4)
    advice = advise(replace(LLAMA, constraints=Constraints(gpus=14)), POOLS)
    assert advice.best is None
    assert {item.code for item in advice.rejections} == {"UnevenNodes", "PrecisionNotSupported"}


def test_a_free_pool_can_be_the_cheapest() -> None:
    advice = advise(replace(LLAMA, objective="cost"), [pool("h100-sxm", 16, 0.0), pool("a100-80", 32, 3.4)])
    assert [offer.pool.name for offer in advice.offers] == ["h100-sxm", "a100-80"]


def test_prices_in_two_currencies_do_not_compare() -> None:
    pools = [pool("h100-sxm", 16), replace(pool("a100-80", 32), currency="EUR")]
    with pytest.raises(SpecError, match="EUR and USD"):
        advise(replace(LLAMA, objective="cost"), pools)


def test_a_pool_without_nodes_says_so() -> None:
    advice = advise(LLAMA, [replace(pool("h100-sxm", 16), max_nodes=0)])
    assert [item.code for item in advice.rejections] == ["EmptyPool"]


def test_too_large_is_an_answer_with_a_remedy() -> None:
    advice = advise(Request("big", Workload(zoo.find_preset("llama-3.1-405b"), 8192, 64)), [pool("a100-80", 8)])
    assert advice.best is None
    (only,) = advice.rejections
    assert only.code == "OutOfMemory"
    assert "GiB too much" in only.message
    assert only.remedy


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (replace(LLAMA, constraints=Constraints(allowed_pools=("b300",))), "spec.constraints.allowedPools"),
        (replace(LLAMA, constraints=Constraints(gpus=64, max_gpus=8)), "spec.constraints.gpus"),
        (replace(LLAMA, baseline=Baseline("b300", 8)), "spec.baseline.pool"),
        (replace(LLAMA, workload=replace(LLAMA.workload, micro_batch=3)), "spec.training.microBatchSize"),
    ],
)
def test_contradictions_name_the_field(request_: Request, field: str) -> None:
    with pytest.raises(SpecError) as caught:
        advise(request_, POOLS)
    assert caught.value.field == field


JOBS = sorted([*(ROOT / "examples" / "jobs").glob("*.yaml"), *(ROOT / "tests" / "jobs").glob("*.yaml")])


def mixed(job: Path) -> list[Pool]:
    """Return the pools of the example cluster, without prices for a job with "unpriced" in its name."""
    cluster = (ROOT / "examples" / "clusters" / "mixed.yaml").read_text()
    pools = nodes.discover_pools(*nodes.parse_objects(cluster)).require_pools()
    return [replace(pool, price_per_gpu_hour=None) if "unpriced" in job.stem else pool for pool in pools]


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_jobs_give_the_reviewed_advice(job: Path) -> None:
    """`tests/advice/` holds the advice for every job of `examples/jobs` and `tests/jobs` on the mixed cluster.

    After an intended change, delete the file, run the test once to regenerate it, and review the difference.
    """
    (manifest,) = documents.load_documents(job.read_text(), job.name)
    advice = advise(training_job.read_request(manifest), mixed(job))
    assert {offer.pool.name for offer in advice.offers} | {item.pool for item in advice.rejections} == {
        "a100-80", "h100-sxm", "l4", "t4"
    }  # fmt: skip
    golden = ROOT / "tests" / "advice" / f"{job.stem}.json"
    if not golden.exists():
        golden.write_text(advice_json(advice))
        pytest.fail(f"wrote {golden.name}: review it and run again")
    assert golden.read_text() == advice_json(advice)


def test_every_reviewed_advice_has_its_job() -> None:
    assert {path.stem for path in (ROOT / "tests" / "advice").glob("*.json")} == {job.stem for job in JOBS}


def test_reviewed_jobs_cover_every_objective() -> None:
    jobs = [training_job.parse_training_job(documents.load_documents(job.read_text(), job.name)[0]) for job in JOBS]
    assert {job.objective for job in jobs} == set(OBJECTIVES)
    for given in ("global_batch_size_range", "framework", "allowed_precisions"):
        assert any(getattr(job.training, given) for job in jobs), given
    assert any(job.baseline and job.baseline.plan for job in jobs)


@pytest.mark.slow
def test_another_process_gives_the_same_bytes(tmp_path: Path) -> None:
    """The bytes depend neither on the hash seed nor on the number of threads."""
    script = "import sys; from tilecast.cli import main; sys.exit(main(sys.argv[1:]))"
    job = ROOT / "tests" / "jobs" / "llama-8b-within-budget.yaml"
    arguments = ["advise", str(job), "--nodes", str(ROOT / "examples" / "clusters" / "mixed.yaml"), "-o", "json"]
    runs = []
    for seed, threads in (("1", "1"), ("2", "7")):
        settings = {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            env=os.environ | settings, capture_output=True, check=True,
        )  # fmt: skip
        runs.append(done.stdout)
    assert runs[0] == runs[1]
    reviewed = json.loads((ROOT / "tests" / "advice" / f"{job.stem}.json").read_text())
    advice = json.loads(runs[0])
    # The command line also prints what it found in the nodes.
    own, added = reviewed["notes"], advice["notes"][len(reviewed["notes"]) :]
    assert advice == reviewed | {"notes": [*own, *added]}
    assert all("tainted" in note or note.startswith(("Assumed: attention", "No framework")) for note in added)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_names_every_pool(name: str) -> None:
    text = FORMATS[name](advise(LLAMA, POOLS))
    assert all(item.name in text for item in POOLS)
    assert text.endswith("\n")


@pytest.mark.slow
def test_an_odd_batch_is_told_the_neighbour_that_is_faster_per_sample() -> None:
    h100 = [pool("h100-sxm", 8)]
    job = Request("odd", Workload(zoo.find_preset("gpt2"), 1024, 60))
    odd = advise(job, h100)
    even = advise(replace(job, workload=replace(job.workload, global_batch=64)), h100)
    assert odd.best is not None and even.best is not None
    ratio = (even.best.step_s / 64) / (odd.best.step_s / 60)
    (note,) = odd.notes
    sentence = f"64 would take {ratio:.2f}x the time per sample, with {even.best.plan} on 8 GPUs."
    assert note == f"Global batch 60 does not split evenly over 8 GPUs: a global batch of {sentence}"
    assert ratio < 0.9 and not even.notes
    for other in (replace(job, batches=(48, 60)), replace(job, objective="cost")):
        assert not any("split evenly" in text for text in advise(other, h100).notes)


def test_a_simpler_plan_that_is_faster_and_cheaper_is_advised() -> None:
    """A slow host takes longer with this plan, which decides between similar plans, but not against time and cost."""
    config = json.loads((ROOT / "tests" / "configs.json").read_text())["openbmb/MiniCPM3-4B"]["config"]
    workload = Workload(huggingface.model(config), 2048, 64)
    best = advise(Request("x", workload), [pool("h100-sxm", 64, 6.9)]).best
    assert best is not None
    assert (best.plan.tensor, best.plan.pipeline, best.plan.checkpointing) == (1, 1, "none")
