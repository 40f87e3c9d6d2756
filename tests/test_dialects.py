"""The ranked pools in the words of schedulers, `-o dra` and so on."""

from __future__ import annotations

import ast
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import tilecast
from tilecast.advice import Advice, Offer
from tilecast.cli import main
from tilecast.hardware import list_gpus
from tilecast.render.dialects import DIALECTS, parts, write_dialect
from tilecast.spec import SpecError

ROOT = Path(__file__).resolve().parent.parent
JOB, NODES = "examples/jobs/llama-7b-pretrain.yaml", "examples/clusters/mixed.yaml"


@pytest.fixture(scope="module")
def advice() -> Advice:
    """Return advice in which the pools of `mixed.yaml` have best plans on different numbers of nodes."""
    return tilecast.advise(str(ROOT / JOB), nodes=str(ROOT / NODES))


@pytest.fixture(scope="module")
def stated() -> Advice:
    """Return advice on pools that are stated by GPU and by instance type."""
    return tilecast.advise("gpt2", seq=1024, batch=64, gpus="p5.48xlarge:1,a100-80:8,a100-40:8,rtx-4090:8")


def documents(text: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(text) if one]


def options(text: str) -> dict[str, Any]:
    (assignment,) = ast.parse(text).body
    assert isinstance(assignment, ast.Assign)
    return ast.literal_eval(assignment.value)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", DIALECTS)
def test_comments_rank_the_pools_as_the_table_does(name: str, advice: Advice) -> None:
    lines = [line for line in write_dialect(name, advice).splitlines() if line.startswith("#")]
    ranked = [line.split(":")[0].split(". ")[1] for line in lines if line[4:5].isdigit()]
    assert ranked == ["h100-sxm", "a100-80", "l4"]
    assert str(advice.offers[0].plan) in lines[1 if name != "slurm" else 2]
    assert any("t4: no BF16 units" in line for line in lines)


@pytest.mark.parametrize("name", DIALECTS)
def test_the_command_prints_what_python_writes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["gpt2", "--seq", "1024", "--batch", "64", "--gpus", "l4:8,t4:8"]
    assert main(["advise", *flags, "-o", name]) == 0
    given = tilecast.advise("gpt2", seq=1024, batch=64, gpus="l4:8,t4:8")
    assert capsys.readouterr().out == given.write_dialect(name)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_plan_that_may_not_fit_is_said_with_a_safer_one(name: str) -> None:
    """Dialects once printed a plan of 72-95 of 78 GiB without a word, where `--launch` names a safer one."""
    tight = tilecast.advise("llama-3.1-8b", seq=8192, batch=16, gpus="h100-sxm:16", framework="fsdp2")
    assert tight.best is not None and tight.best.is_tight and tight.safer is not None
    text = tight.write_dialect(name)
    comments = [line for line in text.splitlines() if line.startswith("#")]
    (first,) = (line for line in comments if "1. h100-sxm" in line)
    assert first.endswith("of 78 GiB a GPU; may run out of memory")
    (second,) = (line for line in comments if "Safer on h100-sxm" in line)
    assert f"plan {tight.safer.plan}, " in second
    if name == "slurm":
        assert any("sbatch" in line and line.endswith(f"train.sh h100-sxm {tight.safer.plan}") for line in comments)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_plan_with_memory_to_spare_has_no_warning(name: str) -> None:
    roomy = tilecast.advise("gpt2-xl", seq=1024, batch=64, gpus="h100-sxm:8", framework="fsdp2")
    text = roomy.write_dialect(name)
    assert roomy.best is not None and not roomy.best.is_tight
    assert "run out of memory" not in text and "Safer" not in text


@pytest.mark.parametrize("name", DIALECTS)
def test_nothing_but_comments_without_a_pool(name: str) -> None:
    refused = tilecast.advise("llama-3.1-405b", seq=8192, batch=64, gpus="t4:8")
    lines = write_dialect(name, refused).splitlines()
    assert all(line.startswith("#") for line in lines)
    assert "no pool can run it" in lines[0]


def test_an_unknown_dialect_and_a_section_are_refused(advice: Advice, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpecError, match="'nomad' is not known"):
        write_dialect("nomad", advice)
    flags = ["gpt2", "--seq", "1024", "--batch", "64", "--gpus", "l4:8"]
    assert main(["advise", *flags, "-o", "dra", "--explain"]) == 2
    assert capsys.readouterr().err == "tilecast: --explain: has no place in -o dra; leave it out\n"


@pytest.mark.parametrize("name", ["dra", "kueue", "karpenter", "skypilot"])
def test_a_name_of_many_lines_stays_in_a_comment(name: str, advice: Advice) -> None:
    request = replace(advice.request, name="a\nkind: Secret\r\nb" + "x" * 300)
    given = write_dialect(name, replace(advice, request=request))
    kept = write_dialect(name, advice)
    assert [one.get("kind") for one in documents(given)] == [one.get("kind") for one in documents(kept)]
    for one in documents(given):
        assert len(one["metadata"]["name"] if "metadata" in one else one["name"]) <= 63


# Dynamic Resource Allocation


def test_a_claim_lists_the_gpus_of_a_pod_in_each_pool(advice: Advice) -> None:
    (template,) = documents(write_dialect("dra", advice))
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert [one["name"] for one in request["firstAvailable"]] == ["h100-sxm", "a100-80", "l4"]
    assert [one["count"] for one in request["firstAvailable"]] == [8, 8, 8]


def test_each_alternative_takes_its_own_devices_only(tmp_path: Path) -> None:
    """Let a Job use the claim, and let `advise` evaluate its selectors on devices that a driver publishes."""
    nodes = str(ROOT / "examples" / "dra" / "nodes.yaml")
    given = tilecast.advise("gpt2", seq=1024, batch=64, exact_gpus=4, max_nodes=1, nodes=nodes)
    text = given.write_dialect("dra")
    (template,) = documents(text)
    _, job = documents((ROOT / "examples" / "dra" / "job.yaml").read_text())
    job["spec"] |= {"parallelism": 1, "completions": 1}
    job["metadata"]["annotations"] = {
        "tilecast.dev/model": "gpt2",
        "tilecast.dev/training": '{"sequenceLength": 1024, "globalBatchSize": 64}',
    }
    claims = job["spec"]["template"]["spec"]["resourceClaims"]
    claims[0]["resourceClaimTemplateName"] = template["metadata"]["name"]
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump_all([template, job]))
    met = {one.pool.name: one.device_requests for one in tilecast.advise(str(file), nodes=nodes).offers}
    named = {one["name"] for one in template["spec"]["spec"]["devices"]["requests"][0]["firstAvailable"]}
    assert met == {name: (f"gpus/gpus/{name}",) for name in named}


@pytest.mark.slow
def test_a_claim_has_no_more_alternatives_than_kubernetes_allows() -> None:
    gpus = ",".join(
        f"{name}:1" for name in ("t4", "l4", "a10", "a10g", "a30", "a40", "l40", "l40s", "h100-sxm", "h200", "b200")
    )
    given = tilecast.advise("gpt2", seq=1024, batch=64, gpus=gpus)
    assert len(given.offers) > 8
    (template,) = documents(write_dialect("dra", given))
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert len(request["firstAvailable"]) == 8


# Kueue


def test_flavors_come_in_the_order_of_the_ranking_with_the_gpus_that_were_found(advice: Advice) -> None:
    *flavors, queue = documents(write_dialect("kueue", advice))
    (group,) = queue["spec"]["resourceGroups"]
    assert [one["name"] for one in group["flavors"]] == [one["metadata"]["name"] for one in flavors]
    for flavor, offer, quotas in zip(flavors, advice.offers, group["flavors"], strict=True):
        assert flavor["spec"]["nodeLabels"] == offer.pool.node_selector
        assert [one["name"] for one in quotas["resources"]] == group["coveredResources"]
        assert quotas["resources"][-1] == {"name": "nvidia.com/gpu", "nominalQuota": offer.pool.max_gpus}


def test_a_pool_without_labels_is_said(stated: Advice) -> None:
    text = write_dialect("kueue", stated)
    assert text.count("add spec.nodeLabels of its nodes") == len(stated.offers)


# Karpenter


def test_weights_fall_with_the_rank_and_limits_hold_the_plan(advice: Advice) -> None:
    pools = documents(write_dialect("karpenter", advice))
    assert [one["spec"]["weight"] for one in pools] == [100, 99, 98]
    assert [one["spec"]["limits"]["nvidia.com/gpu"] for one in pools] == [one.gpus for one in advice.offers]
    assert [one["spec"]["template"]["spec"]["requirements"][0]["values"] for one in pools] == [
        [one.pool.node_type] for one in advice.offers
    ]


def test_instance_types_are_those_with_the_gpus_and_never_an_assumed_one(stated: Advice) -> None:
    pools = {one["metadata"]["name"]: one for one in documents(write_dialect("karpenter", stated))}
    types = {name: one["spec"]["template"]["spec"]["requirements"][0]["values"] for name, one in pools.items()}
    # What `--gpus a100-80:8` assumes is a node of Azure; nodes with 8 such GPUs are made on AWS too.
    assert types == {
        "gpt2-h100-sxm": ["p5.48xlarge"],
        "gpt2-a100-80": ["p4de.24xlarge"],
        "gpt2-a100-40": ["p4d.24xlarge"],
    }
    assert "rtx-4090: no instance type" in write_dialect("karpenter", stated)


def test_karpenter_sets_no_label_of_its_own_or_of_kubernetes(advice: Advice) -> None:
    labels = {"kubernetes.io/arch": "amd64", "karpenter.k8s.aws/instance-gpu-name": "h100", "team": "a"}
    offers = tuple(replace(one, pool=replace(one.pool, node_selector=labels)) for one in advice.offers)
    for one in documents(write_dialect("karpenter", replace(advice, offers=offers))):
        assert one["spec"]["template"]["metadata"]["labels"] == {"team": "a"}


# Ray, SkyPilot and Slurm


def test_ray_falls_back_in_the_order_of_the_ranking(advice: Advice, stated: Advice) -> None:
    given = options(write_dialect("ray", advice))
    kinds = [given["label_selector"], *(one["label_selector"] for one in given["fallback_strategy"])]
    assert [one["ray.io/accelerator-type"] for one in kinds] == ["H100", "A100", "L4"]
    assert given["num_gpus"] == 8
    text = write_dialect("ray", stated)
    assert "a100-40: Ray's own labels do not tell" in text
    assert str(options(text)).count("'A100'") == 1


def test_skypilot_tries_the_pools_in_the_order_of_the_ranking(advice: Advice, stated: Advice) -> None:
    (task,) = documents(write_dialect("skypilot", advice))
    assert task["num_nodes"] == 2
    assert [one["accelerators"] for one in task["resources"]["ordered"]] == ["H100:8", "A100-80GB:8", "L4:8"]
    assert all(one["infra"] == "kubernetes" for one in task["resources"]["ordered"])
    (task,) = documents(write_dialect("skypilot", stated))
    assert task["resources"]["ordered"][0] == {
        "accelerators": "H100:8", "infra": "aws", "instance_type": "p5.48xlarge",
    }  # fmt: skip
    assert {"infra", "instance_type"}.isdisjoint(task["resources"]["ordered"][1])


def test_a_slice_is_named_where_a_dialect_can() -> None:
    given = tilecast.advise("resnet-50", batch=16, gpus="a100-40-mig-3g.20gb:1,l4:1", allow_sharing=True)
    assert "a100-40-mig-3g.20gb" in {one.pool.name for one in given.offers}
    (template,) = documents(write_dialect("dra", given))
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    sliced = next(one for one in request["firstAvailable"] if one["deviceClassName"] == "mig.nvidia.com")
    assert 'profile == "3g.20gb"' in sliced["selectors"][1]["cel"]["expression"]
    *_, queue = documents(write_dialect("kueue", given))
    (group,) = queue["spec"]["resourceGroups"]
    assert {"nvidia.com/gpu", "nvidia.com/mig-3g.20gb"} < set(group["coveredResources"])
    assert "mig" not in yaml.safe_dump(documents(write_dialect("skypilot", given)))


def submissions(text: str, tmp_path: Path) -> Iterator[list[str]]:
    """Run the script with an sbatch that prints its arguments, and yield these of each call."""
    (tmp_path / "sbatch").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\necho\n')
    (tmp_path / "sbatch").chmod(0o755)
    (tmp_path / "all.sh").write_text(text)
    command = ["sh", "-eu", str(tmp_path / "all.sh")]
    done = subprocess.run(
        command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    yield from (call.splitlines() for call in done.stdout.strip().split("\n\n"))


def test_slurm_gets_one_submission_for_each_pool(advice: Advice, tmp_path: Path) -> None:
    calls = list(submissions(write_dialect("slurm", advice), tmp_path))
    for rank, (call, offer) in enumerate(zip(calls, advice.offers, strict=True)):
        assert call[-3:] == ["train.sh", offer.pool.name, str(offer.plan)]
        assert {f"--nodes={offer.nodes}", f"--nice={100 * rank}", "--job-name=llama-7b-pretrain"} < set(call)


def test_a_hostile_pool_name_is_one_word_of_the_script(advice: Advice, tmp_path: Path) -> None:
    hostile = "x; touch pwned\n$(id) 'a'"

    def renamed(offer: Offer) -> Offer:
        return replace(offer, pool=replace(offer.pool, name=hostile))

    changed = replace(advice, offers=tuple(map(renamed, advice.offers)))
    text = write_dialect("slurm", changed)
    assert shlex.quote(hostile) in text
    assert "\n$(id)" not in text.split("sbatch")[0]
    list(submissions(text.replace("\n$(id)", " $(id)"), tmp_path))
    assert not Path("pwned").exists()


def test_every_gpu_has_names() -> None:
    assert parts.read_gpu_names().keys() == list_gpus().keys()


def test_objects_of_equal_names_are_told_apart(advice: Advice) -> None:
    pools = [replace(advice.offers[0].pool, name=name) for name in ("a.b", "a-b", "A_B", "-", "x" * 80)]
    offers = [replace(advice.offers[0], pool=pool) for pool in pools]
    assert parts.name_offers(offers) == ["a-b", "a-b-2", "a-b-3", "x", "x" * 63]


def test_long_names_of_node_pools_stay_different(advice: Advice) -> None:
    """Names are cut to what Kubernetes allows, and still differ."""
    long = "team-with-a-really-long-name-eu-west-1-h100-"
    pools = [replace(advice.offers[0].pool, name=f"{long}{end}") for end in "ab"]
    offers = tuple(replace(advice.offers[0], pool=pool) for pool in pools)
    request = replace(advice.request, name="a-very-long-job-name-for-this-run")
    found = documents(write_dialect("karpenter", replace(advice, request=request, offers=offers)))
    names = [one["metadata"]["name"] for one in found]
    assert len(set(names)) == len(names) == 2
    assert all(len(name) <= 63 and name[-1].isalnum() for name in names)


def test_characters_that_yaml_forbids_are_left_out() -> None:
    assert parts.write_comments(["a\x1b[31m\0b", "c\nd"]) == "# a[31mb\n# c d\n"
