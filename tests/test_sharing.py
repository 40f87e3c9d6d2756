"""A job that cannot fill a GPU is offered a slice or a shared GPU; one that can is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast import hardware, memory, search, zoo
from tilecast.advice import Constraints, Request, advise, sharing
from tilecast.advice.sharing import SharingJob
from tilecast.api import training_job
from tilecast.cli import main
from tilecast.hardware import Pool, find_gpu, find_link, list_gpus
from tilecast.spec import SpecError, Workload

ROOT = Path(__file__).resolve().parent.parent
CUT = [name for name, gpu in list_gpus().items() if hardware.list_mig_profiles(gpu)]


def pool(gpu: str, per_node: int = 8, nodes: int = 2) -> Pool:
    facts = find_gpu(gpu)
    link = find_link(facts.intra_link)
    return Pool(facts.name, facts, per_node, nodes, link, find_link("ethernet-100"), price_per_gpu_hour=3.0)


SMALL = Workload(zoo.find_preset("resnet-18"), 1, 4, "bf16")
LARGE = Workload(zoo.find_preset("llama-2-7b"), 4096, 8, "bf16")
GPUS = ["a100-40", "a100-80", "h100-sxm"]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.slow
def test_resnet_18_with_batch_4_gets_a_slice(gpu: str) -> None:
    shares = sharing.find_sharing_options(SMALL, pool(gpu))
    assert shares is not None
    assert shares.best is not None
    assert shares.best.kind == "mig"
    assert shares.best.profile == hardware.list_mig_profiles(find_gpu(gpu))[0].name
    assert shares.best.jobs == 7
    assert 1 <= shares.best.slowdown < 1.25
    assert shares.best.relative_cost < 0.2
    assert shares.best.memory_bytes <= shares.best.memory_available_bytes
    advice = advise(Request("small", SMALL), [pool(gpu)])
    assert advice.best is not None
    assert advice.best.gpus == 1
    assert any(shares.best.resource in note and "allowSharing" in note for note in advice.notes)


@pytest.mark.parametrize("gpu", GPUS)
def test_llama_7b_does_not(gpu: str) -> None:
    assert sharing.find_sharing_options(LARGE, pool(gpu)) is None
    advice = advise(Request("large", LARGE, constraints=Constraints(allow_sharing=True)), [pool(gpu)])
    assert advice.best is not None
    assert advice.sharing is None
    assert not any("slice" in note for note in advice.notes)


@pytest.mark.slow
def test_a_job_that_fills_a_gpu_is_left_alone_unless_cost_counts() -> None:
    busy = Workload(zoo.find_preset("gpt2"), 1024, 8, "bf16")
    shares = sharing.find_sharing_options(busy, pool("h100-sxm"))
    assert shares is not None
    assert shares.options
    assert shares.best is None
    cheap = sharing.find_sharing_options(busy, pool("h100-sxm"), "cost")
    assert cheap is not None
    assert cheap.best is not None
    assert cheap.best.slowdown > sharing.MAX_SLOWDOWN
    assert cheap.best.relative_cost <= sharing.MAX_RELATIVE_COST


def test_gpus_without_slices_are_shared() -> None:
    shares = sharing.find_sharing_options(replace(SMALL, precision="fp16"), pool("t4"))
    assert shares is not None
    assert shares.best is not None
    assert shares.best.kind in ("mps", "timeSlicing")
    assert shares.best.jobs * shares.best.memory_bytes <= memory.usable_bytes(find_gpu("t4"))
    assert shares.best.share == 1 / shares.best.jobs


@settings(max_examples=20)
@given(
    gpu=st.sampled_from(CUT),
    name=st.sampled_from(["resnet-18", "bert-base", "gpt2"]),
    batch=st.sampled_from([4, 16, 64]),
)
@pytest.mark.slow
def test_no_part_beats_the_whole_and_all_widen_the_range(gpu: str, name: str, batch: int) -> None:
    model = zoo.find_preset(name)
    workload = Workload(model, 256 if model.vocab else 1, batch, "bf16")
    shares = sharing.find_sharing_options(workload, pool(gpu))
    assert shares is not None
    for option in shares.options:
        assert option.step_s >= shares.whole_s
        assert option.slowdown == pytest.approx(option.step_s / shares.whole_s)
        assert option.lower_s < option.step_s < option.upper_s
        assert 0 < option.share < 1
        held = option.memory_bytes * (1 if option.kind == "mig" else option.jobs)
        assert held <= option.memory_available_bytes
        assert option.cost_per_1000_steps == pytest.approx(3.0 * option.share * option.step_s / 3.6)
    slices = [option for option in shares.options if option.kind == "mig"]
    wide = [option.slowdown for option in slices if option.profile[0] == "3"]
    thin = [option.slowdown for option in slices if option.profile[0] == "1"]
    assert not (wide and thin) or wide[0] <= min(thin) * (1 + 1e-9)


@given(
    members=st.lists(st.tuples(st.floats(0, 8e9), st.floats(0, 1)).map(lambda pair: SharingJob(*pair)), max_size=6),
)
def test_jobs_on_one_gpu_add_up(members: list[SharingJob]) -> None:
    gpu = find_gpu("t4")
    slower = sharing.time_slicing_slowdown(members, gpu)
    assert (slower is None) == (sum(item.memory_bytes for item in members) > memory.usable_bytes(gpu))
    if slower is not None:
        assert slower == max(1, sum(item.busy for item in members))


@pytest.mark.parametrize("name", CUT)
def test_profiles_are_parts_of_their_gpu(name: str) -> None:
    gpu = find_gpu(name)
    for profile in hardware.list_mig_profiles(gpu):
        part = profile.slice_gpu(gpu)
        assert find_gpu(part.name) == part
        assert find_gpu(f"{gpu.product}-MIG-{profile.name}") == part
        assert profile.instances * profile.sms <= gpu.sm_count
        assert profile.instances * profile.memory_bytes <= gpu.memory_bytes
        assert profile.instances * profile.share <= 1 + 1e-9
        assert profile.memory_bytes / gpu.memory_bytes == pytest.approx(profile.memory_share, rel=0.12)
        assert part.peak("fp32") / gpu.peak("fp32") == pytest.approx(profile.sms / gpu.sm_count)
        gigabytes = float(profile.name.split("g.")[1].removesuffix("gb"))
        assert profile.memory_bytes / 2**30 == pytest.approx(gigabytes, rel=0.12)
        assert not hardware.list_mig_profiles(part)
    with pytest.raises(SpecError, match="no profile"):
        find_gpu(f"{name}-mig-9g.1gb")


def test_a_job_runs_on_one_slice_and_only_where_it_may() -> None:
    part = replace(pool("h100-sxm"), name="cut", gpu=find_gpu("h100-sxm-mig-3g.40gb"), gpus_per_node=16)
    assert set(search.enumerate_plans(SMALL, part).gpus) == {1}
    refused = advise(Request("small", SMALL), [part])
    assert refused.best is None
    assert [(item.code, "allowSharing" in item.remedy) for item in refused.rejections] == [("SharingNotAllowed", True)]
    allowed = advise(Request("small", SMALL, constraints=Constraints(allow_sharing=True)), [part])
    assert allowed.best is not None
    assert (allowed.best.gpus, allowed.sharing) == (1, None)


@pytest.mark.slow
def test_a_manifest_allows_it_and_programs_read_it(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "examples" / "jobs" / "resnet-18-small.yaml"
    request = training_job.read_request(yaml.safe_load(path.read_text()))
    assert request.constraints.allow_sharing
    assert main(["advise", str(path), "--gpus", "a100-80:1", "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)["sharing"]
    assert document["best"]["resource"] == "nvidia.com/mig-1g.10gb"
    assert document["best"]["jobsPerGpu"] == 7
    assert document["best"]["stepSeconds"]["target"] >= document["wholeStepSeconds"]
    assert main(["advise", str(path), "--gpus", "a100-80:1"]) == 0
    assert "a MIG slice 1g.10gb of a100-80" in capsys.readouterr().out


def test_show_lists_the_slices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "gpus"]) == 0
    assert "1g.5gb, 1g.10gb, 2g.10gb, 3g.20gb" in capsys.readouterr().out
    assert main(["show", "gpus", "a30"]) == 0
    assert "per_gpu 4" in capsys.readouterr().out
