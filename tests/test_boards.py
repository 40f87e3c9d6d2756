"""A GPU by its name, by its file and by its facts in a GPUPool is one GPU; boards are derived from their siblings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic.alias_generators import to_camel

from tilecast import nodes, search, zoo
from tilecast.api.gpu_pool import GpuFacts, Rates, SustainedRatios
from tilecast.hardware import Gpu, Pool, find_gpu, list_gpus, list_mig_profiles, read_gpu_file
from tilecast.hardware.boards import FIGURES
from tilecast.hardware.instances import find_default_network
from tilecast.spec import PRECISIONS, Plan, Plans, SpecError, Workload
from tilecast.validate.reading import find_usual_network

NOT_FACTS = {
    "name": "spec.gpu.name",
    "aliases": "other spellings of the name",
    "sources": "where the numbers come from",
    "bridge": "spec.links.intraNode",
}
"""Fields of a GPU file that no facts of a GPUPool have, and what says them there or why nothing does."""
ADDED = ("fp16AccumulateTflops", "sustainedRatio")
"""Facts that a GPUPool may leave open."""


def stated_facts(name: str, product: str | None = None, *, leave_open: bool = False) -> dict[str, Any]:
    """Return what a GPU's file says as the facts of a GPUPool."""
    file = read_gpu_file(name).model_dump(exclude_defaults=True)
    camel = {info.alias or to_camel(field): field for field, info in GpuFacts.model_fields.items()}
    facts = {key: file[field] for key, field in camel.items() if field in file}
    if leave_open:
        facts = {key: value for key, value in facts.items() if key not in ADDED}
    return {**facts, **({"product": product} if product else {})}


def pool_of(gpu: dict[str, Any]) -> Pool:
    document = {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "GPUPool",
        "metadata": {"name": "mine"},
        "spec": {"gpu": gpu, "gpusPerNode": 8, "maxNodes": 2},
    }
    [pool] = nodes.discover_pools([], [document]).pools
    return pool


def steps(pool: Pool) -> list[float]:
    """Return the steps of a few models in every precision, on one GPU and on two nodes."""
    seconds = []
    for precision in (name for name in PRECISIONS if pool.gpu.supports(name)):
        for model, sequence in (("gpt2-medium", 1024), ("resnet-50", 1)):
            job = Workload(zoo.find_preset(model), sequence, 16, precision=precision)
            plans = Plans.from_plans(Plan(gradient_accumulation=16), Plan(data=16))
            priced = search.price(job, plans, pool)
            seconds += [*priced.step_s.tolist(), *np.asarray(priced.memory_bytes).tolist()]
    return seconds


def test_a_gpu_pool_can_say_every_fact_of_a_gpu_file() -> None:
    from tilecast.hardware import GpuFile

    assert set(GpuFile.model_fields) - set(GpuFacts.model_fields) == set(NOT_FACTS)
    assert set(Rates.model_fields) == set(PRECISIONS)
    assert set(SustainedRatios.model_fields) == {*PRECISIONS, "attention"}


@pytest.mark.parametrize("name", list_gpus())
def test_a_gpu_by_its_facts_is_the_gpu_of_its_file(name: str) -> None:
    """Whether the facts are whole or as few as a GPUPool must state, and whatever the GPU is called there."""
    file, known = find_gpu(name), pool_of({"name": name})
    for facts in (
        stated_facts(name),
        stated_facts(name, leave_open=True),
        stated_facts(name, "A card of mine", leave_open=True),
    ):
        mine = pool_of({"name": "mine", "facts": facts})
        same = replace(
            mine.gpu, name=name, product=file.product, aliases=file.aliases, bridge=file.bridge, sibling=file.sibling
        )
        assert same == file
        assert (mine.intra, mine.inter) == (known.intra, known.inter)


@pytest.mark.parametrize("name", ["rtx-3090", "rtx-4090", "l4", "t4", "b200", "a10", "h100-sxm", "v100-sxm"])
@pytest.mark.slow
def test_facts_forecast_what_the_file_forecasts(name: str) -> None:
    facts = stated_facts(name, leave_open=True)
    assert steps(pool_of({"name": "mine", "facts": facts})) == steps(pool_of({"name": name}))


def test_figures_of_its_own_make_a_product_of_its_own() -> None:
    facts = stated_facts("rtx-3090", "A card of mine", leave_open=True)
    assert pool_of({"name": "mine", "facts": facts}).gpu.fp16_accumulate_flops == 142e12
    for figure in FIGURES:
        key = next(info.alias or to_camel(field) for field, info in GpuFacts.model_fields.items() if field == figure)
        other = {**facts, key: facts[key] + 1}
        if abs(other[key] / facts[key] - 1) > 0.01:
            assert pool_of({"name": "mine", "facts": other}).gpu.fp16_accumulate_flops == 0.0


def test_stated_facts_win_over_those_of_the_same_product() -> None:
    facts = {**stated_facts("rtx-3090"), "fp16AccumulateTflops": 71, "sustainedRatio": {"bf16": 0.5}}
    gpu = pool_of({"name": "mine", "facts": facts}).gpu
    assert (gpu.fp16_accumulate_flops, gpu.sustained_ratio["bf16"], gpu.sustained_ratio["fp16"]) == (71e12, 0.5, 1.0)


BOARDS = {
    "A100-PCIe-96GB": ("a100-80-pcie-96gb", "a100-80-pcie", 96, 1935 * 96 / 80),
    "NVIDIA-A100-SXM-64GB": ("a100-80-64gb", "a100-80", 64, 2039 * 64 / 80),
    "RTX-4090-48GB": ("rtx-4090-48gb", "rtx-4090", 47.8, 1008),
    "GH200-144GB-HBM3e": ("gh200-144gb-hbm3e", "gh200", 143.4, 4800),
    "h100-sxm-32gb-hbm3": ("h100-64-32gb-hbm3", "h100-64", 32, 1340),
}


@pytest.mark.parametrize(("spelling", "expected"), BOARDS.items())
def test_a_board_with_another_memory_is_derived(spelling: str, expected: tuple[str, str, float, float]) -> None:
    name, sibling, gib, bandwidth = expected
    gpu, whole = find_gpu(spelling), find_gpu(sibling)
    assert (gpu.name, gpu.sibling, find_gpu(gpu.name).name) == (name, sibling, name)
    assert gpu.memory_bytes == pytest.approx(gib * 2**30, rel=0.001)
    assert gpu.memory_bandwidth_bytes_per_s == pytest.approx(bandwidth * 1e9)
    assert (gpu.peak_flops, gpu.sm_count, gpu.sustained_ratio) == (
        whole.peak_flops,
        whole.sm_count,
        whole.sustained_ratio,
    )
    assert find_default_network(gpu, 8) == find_default_network(whole, 8)
    assert find_usual_network(gpu) == find_usual_network(whole)
    shown = read_gpu_file(spelling)
    assert replace(shown.to_gpu(), aliases=gpu.aliases, sibling=sibling) == gpu
    assert sibling in shown.sources["board"]
    assert list_mig_profiles(gpu) == ()


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("H100-SXM5-64GB-HBM2e", "h100-64"),
        ("NVIDIA-H100-64GB-HBM2", "h100-64"),
        ("RTX-4090-24GB", "rtx-4090"),
        ("H100-PCIe-80GB-HBM2e", "h100-pcie"),
        ("B200-180GB", "b200"),
        ("T4-16GB", "t4"),
        ("A100-SXM4-80GB-400W", "a100-80"),
    ],
)
def test_a_board_that_differs_in_nothing_is_its_sibling(spelling: str, name: str) -> None:
    assert find_gpu(spelling) is find_gpu(name)


def test_power_and_clock_of_a_board() -> None:
    whole = find_gpu("h100-96")
    limited = find_gpu("H100-SXM-96GB-500W")
    shipped = find_gpu("h100-96-hbm2e")
    assert (limited.sibling, limited.tdp_w) == ("h100-96", 500)
    assert limited.sustained_ratio["bf16"] == pytest.approx(shipped.sustained_ratio["bf16"], abs=0.01)
    assert limited.sustained_ratio["fp32"] == whole.sustained_ratio["fp32"]
    slow = find_gpu("H100-SXM-96GB-990MHz")
    assert slow.boost_clock_hz == whole.boost_clock_hz / 2
    assert slow.peak("bf16") == whole.peak("bf16") / 2
    assert slow.memory_bandwidth_bytes_per_s == whole.memory_bandwidth_bytes_per_s


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        ("H100-SXM-6000GB", "6000 GB of memory"),
        ("H100-SXM-10MHz", "10 MHz of clock"),
        ("A100-PCIe-80GB-9W", "9 W of power"),
        ("H101-SXM-64GB", "unknown GPU"),
        ("H100-SXM-64GB-water-cooled", "unknown GPU"),
        ("H100-SXM-0GB", "unknown GPU"),
    ],
)
def test_a_board_too_far_from_any_is_refused(spelling: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as refused:
        find_gpu(spelling)
    assert refused.value.remedy and "\n" not in str(refused.value)


def test_a_node_label_names_a_board() -> None:
    node = {
        "metadata": {"name": "n1", "labels": {"nvidia.com/gpu.product": "NVIDIA-A100-PCIe-96GB"}},
        "status": {"capacity": {"nvidia.com/gpu": "8"}, "allocatable": {"nvidia.com/gpu": "8"}},
    }
    [pool] = nodes.discover_pools([node], []).pools
    board: Gpu = pool.gpu
    assert board.name == "a100-80-pcie-96gb"
