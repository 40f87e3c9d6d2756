"""GPUs that jobs claim by Dynamic Resource Allocation: requests that mean GPUs, and the pools that satisfy them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from existing_jobs import EXAMPLES
from job_store import JOBS, PLACING, JobStore, serving, until
from tilecast import jobs, nodes
from tilecast.api import documents
from tilecast.cli import main
from tilecast.jobs import APPLIED
from tilecast.jobs.claims import match_devices
from tilecast.jobs.device_requests import MAX_SELECTOR
from tilecast.nodes import PublishedDevice
from tilecast.nodes.quantities import parse_gpu_count, parse_size
from tilecast.spec import SpecError
from tilecast_operator.objects.documents import POOL
from tilecast_operator.objects.kinds import KINDS

DRA = EXAMPLES / "dra"
GPU = {"deviceClassName": "gpu.nvidia.com"}
H100 = PublishedDevice(
    "gpu",
    "NVIDIA H100 80GB HBM3",
    (
        ("gpu.nvidia.com/architecture", "Hopper"),
        ("gpu.nvidia.com/cudaComputeCapability", "version:9.0.0"),
        ("gpu.nvidia.com/productName", "NVIDIA H100 80GB HBM3"),
    ),
    (("gpu.nvidia.com/memory", 81559 * 2**20),),
)


def template(*requests: dict[str, Any], kind: str = "ResourceClaimTemplate") -> dict[str, Any]:
    claim = {"devices": {"requests": list(requests)}}
    spec = {"spec": claim} if kind == "ResourceClaimTemplate" else claim
    return {"kind": kind, "metadata": {"name": "t", "namespace": "default"}, "spec": spec}


def selecting(*expressions: str, **more: Any) -> dict[str, Any]:
    return {**GPU, "selectors": [{"cel": {"expression": text}} for text in expressions], **more}


def job(*, pods: int = 2, claim: str = "resourceClaimTemplateName", **more: Any) -> dict[str, Any]:
    container = {"name": "c", "image": "i", "resources": {"claims": [{"name": "gpus"}]}}
    pod = {"containers": [container], "resourceClaims": [{"name": "gpus", claim: "t"}], **more}
    spec = {"parallelism": pods, "completions": pods, "template": {"spec": pod}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a", "namespace": "default"}, "spec": spec}


def read(document: dict[str, Any], *objects: dict[str, Any]) -> jobs.Job:
    return jobs.resolve_claims(
        jobs.read_job(document), {(item["kind"], item["metadata"]["name"]): item for item in objects}
    )


def met(*expressions: str, device: PublishedDevice = H100) -> tuple[str, ...] | str:
    request = {"name": "r", "exactly": selecting(*expressions)}
    return match_devices(read(job(), template(request)), [device])


def test_claims_count_as_gpus_of_each_pod() -> None:
    asked = read(job(), template({"name": "r", "exactly": {**GPU, "count": 4}}))
    assert (asked.gpus, asked.gpus_per_pod) == (8, 4)
    assert asked.has_claims and not asked.is_countable


def test_requests_of_v1beta1_are_read() -> None:
    assert read(job(), template({"name": "r", **GPU, "count": 2})).gpus_per_pod == 2


def test_requests_for_other_devices_ask_for_no_gpu() -> None:
    nic = {"name": "nic", "exactly": {"deviceClassName": "nic.example.com", "count": 8}}
    asked = read(job(), template(nic, {"name": "gpu", "exactly": GPU}))
    assert asked.gpus_per_pod == 1
    with pytest.raises(SpecError, match="ResourceClaims ask for no GPU"):
        jobs.require_gpus(read(job(), template(nic)))


def test_a_device_class_of_ones_own_is_read_with_its_selectors() -> None:
    own = {
        "kind": "DeviceClass",
        "metadata": {"name": "hopper"},
        "spec": {
            "selectors": [
                {
                    "cel": {
                        "expression": "device.driver == 'gpu.nvidia.com' && "
                        "device.attributes['gpu.nvidia.com'].architecture == 'Hopper'"
                    }
                }
            ]
        },
    }
    claim = template({"name": "r", "exactly": {"deviceClassName": "hopper"}})
    assert jobs.find_claim_objects(jobs.read_job(job()), {("ResourceClaimTemplate", "t"): claim}) == {
        ("ResourceClaimTemplate", "t"),
        ("DeviceClass", "hopper"),
    }
    asked = read(job(), claim, own)
    assert match_devices(asked, [H100]) == ("gpus/r",)
    assert match_devices(asked, [replace(H100, attributes=(("gpu.nvidia.com/architecture", "Ampere"),))]) == "gpus/r"


PRODUCT = "device.attributes['gpu.nvidia.com'].productName"


@pytest.mark.parametrize(
    ("expression", "is_met"),
    [
        ("device.driver == 'gpu.nvidia.com'", True),
        (f"{PRODUCT} == 'NVIDIA H100 80GB HBM3'", True),
        (f"{PRODUCT}.lowerAscii().matches('^.*a100.*$')", False),
        ("device.attributes['gpu.nvidia.com'].cudaComputeCapability.isGreaterThan(semver('8.9.0'))", True),
        ("device.attributes['gpu.nvidia.com'].cudaComputeCapability.compareTo(semver('10.0.0')) >= 0", False),
        ("device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('70Gi')) >= 0", True),
        ("device.capacity['gpu.nvidia.com'].memory.isLessThan(quantity('70Gi'))", False),
        ("device.attributes['gpu.nvidia.com'].uuid == 'GPU-1'", False),
        ("'other.com' in device.attributes", False),
        ("has(device.attributes['gpu.nvidia.com'].architecture)", True),
        ("1", False),
    ],
)
def test_a_selector_selects_as_the_scheduler_would(expression: str, is_met: bool) -> None:
    assert met(expression) == (("gpus/r",) if is_met else "gpus/r")


@pytest.mark.parametrize(
    "expression", ["", "device.", "f(", "(" * 6000, "nonsense(device)", "x" * (MAX_SELECTOR + 1), "semver('x') == 1"]
)
def test_a_selector_that_cannot_be_evaluated_is_one_line(expression: str) -> None:
    with pytest.raises(SpecError) as caught:
        met(expression)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_selector_of_nested_loops_is_refused_before_it_runs() -> None:
    rows = f"[{'1,' * 2400}1]"
    with pytest.raises(SpecError, match="too complex"):
        met(f"{rows}.all(x, {rows}.all(y, y == x))")


@given(st.text(max_size=200))
@pytest.mark.slow
def test_no_selector_raises_anything_else(expression: str) -> None:
    try:
        met(expression)
    except SpecError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"name": "r", "exactly": {"deviceClassName": "mig.nvidia.com"}}, "asks for slices"),
        ({"name": "r", "exactly": {**GPU, "allocationMode": "All"}}, "all GPUs of a node"),
        ({"name": "r", "exactly": {**GPU, "count": "x"}}, "is no number of GPUs"),
        ({"name": "r", "exactly": {**GPU, "count": 10**12}}, "is no number of GPUs"),
    ],
)
def test_what_cannot_be_priced_is_said(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read(job(), template(request_))


def test_a_claim_that_pods_share_is_said() -> None:
    shared = template({"name": "r", "exactly": GPU}, kind="ResourceClaim")
    with pytest.raises(SpecError, match="is shared by 2 pods"):
        read(job(claim="resourceClaimName"), shared)
    assert read(job(claim="resourceClaimName", pods=1), shared).gpus == 1
    with pytest.raises(SpecError, match="ResourceClaimTemplate t: cannot be read"):
        read(job())


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
@pytest.mark.slow
def test_a_claim_of_any_shape_is_read_or_one_line(spec: Any) -> None:
    for where in ({"spec": spec}, {"spec": {"spec": {"devices": {"requests": [spec]}}}}):
        try:
            read(job(), {**template(), **where})
        except SpecError as error:
            assert "\n" not in str(error)


def test_the_first_alternative_that_a_pool_meets_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["advise", str(DRA / "job.yaml"), "--nodes", str(DRA / "nodes.yaml"), "-o", "json"])
    advice = json.loads(capsys.readouterr().out)
    assert code == 0
    assert advice["recommendation"]["deviceRequests"] == ["gpus/trainer/h100"]
    assert advice["recommendation"]["gpus"] == 16
    assert [(item["pool"], item["code"]) for item in advice["rejected"]] == [("l4", "ClaimNotMet")]
    assert "gpus/trainer/h100" in advice["recommendation"]["reason"]
    (other,) = [item for item in advice["alternatives"] if item["pool"] == "a100-80"]
    assert "gpus/trainer/a100" in other["reason"]


def test_quantities_are_bounded() -> None:
    assert parse_size("81559Mi") == 81559 * 2**20 and parse_size("1500m") == 2 and parse_size("80G") == 80 * 10**9
    assert [parse_size(text) for text in ("x", "-1", "1e999999999", "9" * 80, "inf", "nan")] == [None] * 6
    assert parse_gpu_count("1e999999999") == parse_gpu_count("1E") == 2**31


def in_store(*more: dict[str, Any]) -> tuple[JobStore, dict[str, Any]]:
    """Return a store that has the example's claim template, and the example's job."""
    store = JobStore()
    claim, given = documents.load_documents((DRA / "job.yaml").read_text())
    path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates/eight-gpus"
    store.objects[path] = {key: value for key, value in claim.items() if key not in ("kind", "apiVersion")}
    return store, given


@pytest.mark.slow
async def test_the_operator_advises_by_claims_and_places_nothing() -> None:
    store, given = in_store()
    body = store.job()
    body["spec"]["template"] = given["spec"]["template"]
    body["spec"] |= {"parallelism": 2, "completions": 2, "suspend": True}
    members, _, slices = nodes.parse_objects((DRA / "nodes.yaml").read_text())
    # Else the operator waits a minute for slices that the server counts and no watch shows.
    store.counts[KINDS["ResourceSlice"].path()] = {"metadata": {}, "items": []}
    async with serving(store, replace(PLACING, read_resource_slices=True)) as running:
        for item in (*members, *slices):
            running.cache.put_object({**item, "metadata": {**item["metadata"], "uid": item["metadata"]["name"]}})
        running.cache.put_object(store.put(f"{JOBS}/a", body))
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "AsksByClaim"
        assert store.now()["spec"]["suspend"] is False
        assert "nodeSelector" not in store.now()["spec"]["template"]["spec"]
        await until(lambda: POOL in store.annotations(), "the advice")
        assert store.annotations()[POOL].startswith("h100-sxm")
        await until(lambda: len(store.events) > 1, "Events")
        assert any("request gpus" in text for _, text in store.events_seen()), store.events_seen()


@pytest.mark.parametrize(
    "mark",
    [
        {"labels": {"kai.scheduler/queue": "research"}},
        {"annotations": {"scheduling.volcano.sh/queue-name": "research"}},
        {"schedulerName": "volcano"},
        {"schedulerName": "kai-scheduler"},
    ],
)
@pytest.mark.slow
async def test_a_job_of_another_batch_scheduler_is_let_go_as_it_is(mark: dict[str, Any]) -> None:
    store = JobStore()
    body = store.job()
    for place in ("labels", "annotations"):
        body["metadata"][place] = {**body["metadata"].get(place, {}), **mark.get(place, {})}
    if "schedulerName" in mark:
        body["spec"]["template"]["spec"]["schedulerName"] = mark["schedulerName"]
    async with serving(store) as running:
        running.cache.put_object(store.put(f"{JOBS}/a", body))
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        assert store.annotations()[APPLIED] == "OtherScheduler" and store.now()["spec"]["suspend"] is False
        assert "nodeSelector" not in store.now()["spec"]["template"]["spec"]
        await until(lambda: POOL in store.annotations(), "the advice")
