"""Pools that discovery writes: what they remember, who owns them, and when they are deleted."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast import nodes
from tilecast.api import gpu_pool
from tilecast.api.gpu_pool import DISCOVERED, DISCOVERY
from tilecast.cli import main
from tilecast.spec import SpecError

PRODUCT = "nvidia.com/gpu.product"
TYPE = "node.kubernetes.io/instance-type"
SHAPES = {
    "h100": ({PRODUCT: "NVIDIA-H100-80GB-HBM3", TYPE: "p5.48xlarge"}, 8),
    "l4-1": ({PRODUCT: "NVIDIA-L4", TYPE: "g6.xlarge"}, 1),
    "l4-8": ({PRODUCT: "NVIDIA-L4", TYPE: "g6.48xlarge"}, 8),
    "spot": ({PRODUCT: "NVIDIA-L4", TYPE: "g6.48xlarge", "karpenter.sh/capacity-type": "spot"}, 8),
    "bare": ({PRODUCT: "NVIDIA-A100-SXM4-80GB"}, 8),
    "network": (
        {"karpenter.k8s.aws/instance-gpu-name": "t4", "karpenter.k8s.aws/instance-network-bandwidth": "40000"},
        4,
    ),
}


def node(name: str, shape: str, **more: str) -> dict[str, Any]:
    labels, gpus = SHAPES[shape]
    amount = {"nvidia.com/gpu": str(gpus)}
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": {**labels, **more}},
        "spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}] if shape == "h100" else []},
        "status": {"capacity": amount, "allocatable": amount},
    }


def mine(name: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": "tilecast.dev/v1alpha1", "kind": "GPUPool", "metadata": {"name": name}, "spec": spec}


def written(report: nodes.NodesReport) -> list[dict[str, Any]]:
    """Return the GPUPools that the operator would have written for these nodes."""
    return [document for item in report.entries if (document := nodes.gpupool_document(item)) is not None]


def cluster(*shapes: str) -> list[dict[str, Any]]:
    return [node(f"n{index}", shape) for index, shape in enumerate(shapes)]


def test_what_is_written_is_a_gpupool_that_says_who_made_it() -> None:
    (document,) = written(nodes.discover_pools(cluster("h100", "h100")))
    assert document["metadata"]["name"] == "h100-sxm"
    assert document["metadata"]["labels"] == {DISCOVERED: "true"}
    assert document["spec"] == {
        "selector": {PRODUCT: "NVIDIA-H100-80GB-HBM3"},
        "gpu": {"name": "h100-sxm"},
        "gpusPerNode": 8,
        "nodeType": "p5.48xlarge",
        "maxNodes": 2,
        "links": {"interNode": "efa-3200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    }
    name, spec = gpu_pool.parse_gpu_pool(document)
    note = gpu_pool.read_discovery(document, spec)
    assert note == gpu_pool.Discovery("8 x h100-sxm, efa-3200, 6.88", "gpu-feature-discovery") and name == "h100-sxm"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_pool_that_lost_its_nodes_is_priced_as_before(shape: str) -> None:
    before = nodes.discover_pools(cluster(shape, shape))
    after = nodes.discover_pools([], written(before))
    assert after.pools == before.pools, "so that no job is advised anew"
    assert (after.entries[0].nodes, after.entries[0].gpus_total, after.obsolete) == (0, 0, ())
    assert written(after) == written(before)


def test_nodes_that_come_and_go_change_no_pool() -> None:
    first = nodes.discover_pools(cluster("h100", "h100", "h100"))
    fewer = nodes.discover_pools(cluster("h100"), written(first))
    assert fewer.pools == first.pools and fewer.entries[0].nodes == 1
    more = nodes.discover_pools(cluster("h100", "h100", "h100", "h100"), written(fewer))
    assert more.entries[0].pool.max_nodes == 4
    gone = nodes.discover_pools(cluster("h100"), written(more), forgotten_pools=["h100-sxm"])
    assert gone.entries[0].pool.max_nodes == 1
    assert nodes.discover_pools([], written(more), forgotten_pools=["h100-sxm"]).obsolete == ("h100-sxm",)


def test_a_name_once_given_stays() -> None:
    first = nodes.discover_pools(cluster("l4-8"))
    assert [pool.name for pool in first.pools] == ["l4"]
    second = nodes.discover_pools(cluster("l4-8", "l4-1"), written(first))
    assert {item.pool.name: item.pool.gpus_per_node for item in second.entries} == {"l4": 8, "l4-1x": 1}
    assert [pool.name for pool in nodes.discover_pools(cluster("l4-8", "l4-1")).pools] == ["l4-1x", "l4-8x"]


def test_a_selector_once_given_stays_while_it_selects() -> None:
    first = nodes.discover_pools(cluster("l4-8"))
    assert first.pools[0].node_selector == {PRODUCT: "NVIDIA-L4"}
    second = nodes.discover_pools(cluster("l4-8", "h100"), written(first))
    assert second.pools[1].node_selector == {PRODUCT: "NVIDIA-L4"}
    third = nodes.discover_pools(cluster("l4-8", "l4-1"), written(second))
    assert {pool.name: pool.node_selector for pool in third.pools if pool.gpu.name == "l4"} == {
        "l4": {TYPE: "g6.48xlarge"},
        "l4-1x": {TYPE: "g6.xlarge"},
    }


def test_spot_is_remembered() -> None:
    (document,) = written(nodes.discover_pools(cluster("spot")))
    assert document["spec"]["spot"] is True
    asleep = nodes.discover_pools([], [document]).entries[0]
    assert asleep.spot and asleep.pool.price_per_gpu_hour is None


@pytest.mark.parametrize("change", ["spec", "label", "annotation"])
def test_whoever_edits_a_pool_owns_it(change: str) -> None:
    everyone = cluster("h100", "h100")
    (document,) = written(nodes.discover_pools(everyone))
    edited = copy.deepcopy(document)
    if change == "spec":
        edited["spec"]["price"] = {"perGpuHour": 1.5}
    elif change == "label":
        edited["metadata"]["labels"][DISCOVERED] = "false"
    else:
        edited["metadata"]["annotations"][DISCOVERY] = "{"
    report = nodes.discover_pools(everyone, [edited])
    (pool,) = report.entries
    assert pool.note is None and nodes.gpupool_document(pool) is None and report.obsolete == ()
    assert pool.pool.name == "h100-sxm" and pool.facts["gpu"] == ("h100-sxm", "override")
    if change == "spec":
        assert pool.pool.price_per_gpu_hour == 1.5


def test_spelling_out_a_default_is_no_edit() -> None:
    (document,) = written(nodes.discover_pools(cluster("h100")))
    document["spec"]["topologyKeys"] = []
    assert gpu_pool.read_discovery(document, gpu_pool.parse_gpu_pool(document)[1]) is not None


@pytest.mark.parametrize("spec", [{"selector": {PRODUCT: "NVIDIA-H100-80GB-HBM3"}}, {"nodeType": "p5.48xlarge"}])
@pytest.mark.parametrize("still_there", [True, False])
def test_a_users_pool_over_the_same_nodes_ends_a_discovered_one(spec: dict[str, Any], still_there: bool) -> None:
    everyone = cluster("h100", "h100")
    old = written(nodes.discover_pools(everyone))
    report = nodes.discover_pools(everyone if still_there else [], [*old, mine("ours", maxNodes=2, **spec)])
    known = [item.pool.name for item in report.entries] + list(report.invalid)
    assert known == ["ours"], "the nodes are not counted twice"
    assert report.obsolete == ("h100-sxm",)


def test_nodes_cut_into_slices_end_their_pool() -> None:
    old = written(nodes.discover_pools(cluster("h100")))
    cut = node("n0", "h100")
    cut["metadata"]["labels"]["nvidia.com/gpu.slices.gi"] = "1"
    report = nodes.discover_pools([cut], old)
    assert report.entries == () and report.obsolete == ("h100-sxm",)


def test_discovery_takes_no_name_that_a_user_took() -> None:
    wrong = mine("h100-sxm", gpu={"name": "h101"})
    other = mine("l4", nodeType="p4d.24xlarge", maxNodes=1)
    report = nodes.discover_pools(cluster("h100", "l4-8"), [wrong, other])
    names = {item.pool.name for item in report.entries if item.note is not None}
    assert names == {"h100-sxm-8x", "l4-8x"} and list(report.invalid) == ["h100-sxm"]


def resource_slice(name: str, on: str, *products: str, **more: Any) -> dict[str, Any]:
    kind, generation, driver = more.get("kind", "gpu"), more.get("generation", 1), more.get("driver", "gpu.nvidia.com")
    attributes = [
        {"type": {"string": kind}, "productName": {"string": product}, "cudaComputeCapability": {"version": "9.0.0"}}
        for product in products
    ]
    devices = [
        {"name": f"gpu-{index}", **({"basic": {"attributes": item}} if more.get("old") else {"attributes": item})}
        for index, item in enumerate(attributes)
    ]
    pool = {"name": on, "generation": generation, "resourceSliceCount": 1}
    return {
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {"driver": driver, "nodeName": on, "pool": pool, "devices": devices},
    }


def plain(name: str = "n", gpus: int | None = None, **labels: str) -> dict[str, Any]:
    capacity = {} if gpus is None else {"nvidia.com/gpu": str(gpus)}
    return {"metadata": {"name": name, "labels": labels}, "status": {"capacity": capacity, "allocatable": capacity}}


@pytest.mark.parametrize("old", [False, True], ids=["v1", "v1beta1"])
def test_resource_slices_answer_before_labels(old: bool) -> None:
    eight = resource_slice("s", "n", *["NVIDIA H100 80GB HBM3"] * 8, old=old)
    wrong = {PRODUCT: "Tesla-T4", TYPE: "g4dn.metal"}
    (pool,) = nodes.discover_pools([plain(**wrong)], (), [eight]).entries
    assert (pool.pool.gpu.name, pool.pool.gpus_per_node) == ("h100-sxm", 8)
    assert pool.facts["gpu"] == ("h100-sxm", "resource-slice")
    assert pool.facts["gpusPerNode"] == ("8", "resource-slice")
    assert pool.gpus_allocatable == 8, "a DRA driver's GPUs are no extended resource"


def test_resource_slices_of_other_drivers_nodes_and_generations_do_not_count() -> None:
    h100 = "NVIDIA H100 80GB HBM3"
    slices = [
        resource_slice("old", "n", h100, h100, generation=1),
        resource_slice("new-1", "n", h100, h100, generation=2),
        resource_slice("new-2", "n", h100, h100, generation=2),
        resource_slice("net", "n", "NIC", driver="net.example.com"),
        resource_slice("else", "m", h100),
    ]
    (pool,) = nodes.discover_pools([plain()], (), slices).entries
    assert pool.pool.gpus_per_node == 4
    shared = {"metadata": {"name": "all"}, "spec": {"driver": "gpu.nvidia.com", "allNodes": True}}
    assert nodes.read_resource_slice(shared) is None


def test_resource_slices_that_name_no_whole_known_gpu_are_reported() -> None:
    cut = resource_slice("s", "n", "NVIDIA A100-SXM4-40GB", kind="mig")
    unknown = resource_slice("s", "n", "NVIDIA Z900")
    two = resource_slice("s", "n", "NVIDIA L4", "Tesla T4")
    codes = [nodes.discover_pools([plain()], (), [item]).left_out[0].code for item in (cut, unknown, two)]
    assert codes == ["MigPartitioned", "UnknownAccelerator", "UnknownAccelerator"]


def test_pools_without_labels_share_one_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The note said "its nodes" of two pools."""
    slices = [resource_slice("s", "a", "NVIDIA L4"), resource_slice("t", "b", "Tesla T4")]
    items = [{"kind": "Node", **plain("a")}, {"kind": "Node", **plain("b")}, *slices]
    (tmp_path / "nodes.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    command = ["advise", "gpt2", "--seq", "128", "--batch", "8", "--nodes", str(tmp_path / "nodes.json")]
    assert main(command) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "l4, t4: no label sets the nodes apart from all others, so that no node selector leads to them." in text


@pytest.mark.parametrize("spec", [{"devices": "x"}, {"devices": ["x"]}, {"devices": [{"attributes": 3}]}, {"pool": 3}])
def test_misshapen_resource_slices_are_one_line(spec: dict[str, Any]) -> None:
    document = {"metadata": {"name": "s"}, "spec": {"driver": "gpu.nvidia.com", "nodeName": "n", **spec}}
    with pytest.raises(SpecError) as caught:
        nodes.read_resource_slice(document)
    assert "\n" not in str(caught.value)


TOPOLOGY = [
    "nvidia.com/gpu.clique", "fabric.topograph.run/tier-0", "fabric.topograph.run/tier-1",
    "accelerator.topograph.run/domain", "accelerator.topograph.run/sub-domain",
    "network.topology.nvidia.com/accelerator", "network.topology.nvidia.com/leaf",
    "network.topology.nvidia.com/spine", "network.topology.nvidia.com/core",
    "cloud.google.com/gce-topology-block", "cloud.google.com/gce-topology-subblock",
    "cloud.google.com/gce-topology-host", "topology.k8s.aws/network-node-layer-1",
    "topology.k8s.aws/network-node-layer-2", "topology.k8s.aws/network-node-layer-3",
    "topology.k8s.aws/ultraserver-id", "topology.k8s.aws/capacity-block-id",
    "oci.oraclecloud.com/host.network_block_id", "oci.oraclecloud.com/host.rack_id", "kubernetes.azure.com/ppg",
    "topology.kubernetes.io/zone", "topology.kubernetes.io/region",
]  # fmt: skip


@pytest.mark.parametrize("key", TOPOLOGY)
def test_topology_labels_of_every_maker_are_read(key: str) -> None:
    everyone = [node(f"n{index}", "h100", **{key: str(index // 3)}) for index in range(4)]
    (pool,) = nodes.discover_pools(everyone).entries
    assert pool.topology == (nodes.TopologyLevel(key, 2, 3),)


def test_topology_keys_of_a_user_replace_the_known_ones() -> None:
    everyone = [node(f"n{index}", "h100", rack=str(index), **{TOPOLOGY[0]: "x"}) for index in range(2)]
    ours = mine("ours", nodeType="p5.48xlarge", topologyKeys=["row", "rack"])
    assert nodes.discover_pools(everyone, [ours]).entries[0].topology == (nodes.TopologyLevel("rack", 2, 1),)


def test_a_users_pool_says_market_flavor_and_network() -> None:
    price = {"perGpuHour": 4.0, "spot": 1.0}
    links = {"interNode": "ethernet-40", "nicsPerNode": 2}
    ours = mine("ours", nodeType="g6.48xlarge", maxNodes=1, spot=True, price=price, kueueFlavor="l4", links=links)
    (pool,) = nodes.discover_pools([], [ours]).entries
    assert (pool.pool.price_per_gpu_hour, pool.spot, pool.kueue_flavor) == (1.0, True, "l4")
    assert (pool.pool.inter.bandwidth_bytes_per_s, pool.pool.inter.nics) == (5e9, 2)
    listed = mine("listed", nodeType="g6.48xlarge", maxNodes=1, spot=True)
    assert nodes.discover_pools([], [listed]).pools[0].price_per_gpu_hour is None, "a list price does not hold for spot"


def test_cordoned_and_broken_nodes_stay_in_their_pool() -> None:
    cordoned, broken = cluster("h100", "h100")
    cordoned["spec"]["unschedulable"] = True
    broken["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
    assert [nodes.read_node(item).schedulable for item in (cordoned, broken, node("n", "h100"))] == [False, False, True]
    assert nodes.discover_pools([cordoned, broken]).entries[0].members == ("n0", "n1")


@settings(max_examples=60)
@given(st.lists(st.lists(st.sampled_from(sorted(SHAPES)), max_size=6), min_size=1, max_size=4))
@pytest.mark.slow
def test_writing_pools_down_converges(history: list[list[str]]) -> None:
    memory: list[dict[str, Any]] = []
    for shapes in history:
        everyone = cluster(*shapes)
        report = nodes.discover_pools(everyone, memory)
        memory = written(report)
        again = nodes.discover_pools(everyone, memory)
        assert (again.pools, written(again), again.obsolete) == (report.pools, memory, ())
        assert sum(item.nodes for item in report.entries) == len(shapes)
        names = [pool.name for pool in report.pools]
        assert len(names) == len(set(names))
        bare = {pool.gpu.name: replace(pool, name="") for pool in nodes.discover_pools(everyone).pools}
        assert bare.keys() <= {pool.gpu.name for pool in report.pools}
