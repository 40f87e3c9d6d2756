"""Nodes as clusters label them: every known product string, and every kind of GPU that is left out."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast import nodes
from tilecast.hardware import find_gpu, list_gpus
from tilecast.hardware.instances import find_default_gpus_per_node, find_default_network, list_node_types
from tilecast.spec import SpecError

CLUSTERS = sorted((Path(__file__).parent.parent / "examples" / "clusters").glob("*.yaml"))
PRODUCT = "nvidia.com/gpu.product"
TYPE = "node.kubernetes.io/instance-type"


def node(name: str, labels: dict[str, str], gpus: int | None = 8, **extra: Any) -> dict[str, Any]:
    amount = {} if gpus is None else {"nvidia.com/gpu": str(gpus)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
        "spec": {"taints": extra.get("taints", [])},
        "status": {"capacity": {"cpu": "8", **amount, **extra.get("capacity", {})}, "allocatable": amount},
    }


def gpu_pool(name: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": "tilecast.dev/v1alpha1", "kind": "GPUPool", "metadata": {"name": name}, "spec": spec}


def gfd(product: str, memory: str, family: str, capability: str, **more: str) -> dict[str, str]:
    """Return the labels of GPU Feature Discovery on a node with whole GPUs."""
    major, minor = capability.split(".")
    return {
        PRODUCT: product,
        "nvidia.com/gpu.memory": memory,
        "nvidia.com/gpu.count": "8",
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.sharing-strategy": "none",
        "nvidia.com/gpu.family": family,
        "nvidia.com/gpu.compute.major": major,
        "nvidia.com/gpu.compute.minor": minor,
        "nvidia.com/gpu.mode": "compute",
        "nvidia.com/mig.capable": "true",
        "nvidia.com/mig.strategy": "mixed",
        "nvidia.com/vgpu.present": "false",
        "nvidia.com/cuda.driver-version.full": "550.107.02",
        "nvidia.com/cuda.runtime-version.full": "12.5",
        "nvidia.com/gpu.clique": "cluster-uuid.1",
        **more,
    }


MACHINE = "nvidia.com/gpu.machine"
LABELS: list[tuple[dict[str, str], str, str]] = [
    (gfd("Tesla-T4", "15360", "turing", "7.5", **{MACHINE: "Google-Compute-Engine"}), "t4", "gpu-feature-discovery"),
    (gfd("Tesla-T4", "15109", "turing", "7.5"), "t4", "gpu-feature-discovery"),
    (gfd("NVIDIA-L4", "23034", "ada-lovelace", "8.9"), "l4", "gpu-feature-discovery"),
    (gfd("A100-SXM4-40GB", "39538", "ampere", "8.0"), "a100-40", "gpu-feature-discovery"),
    (gfd("NVIDIA-A100-SXM4-40GB", "40960", "ampere", "8.0"), "a100-40", "gpu-feature-discovery"),
    (gfd("NVIDIA-A100-SXM4-80GB", "81920", "ampere", "8.0"), "a100-80", "gpu-feature-discovery"),
    (gfd("NVIDIA-H100-80GB-HBM3", "81559", "hopper", "9.0", **{MACHINE: "p5.48xlarge"}), "h100-sxm",
     "gpu-feature-discovery"),
    (gfd("NVIDIA-B200", "183359", "blackwell", "10.0", **{MACHINE: "DGX-1"}), "b200", "gpu-feature-discovery"),
    ({PRODUCT: "Tesla-T4"}, "t4", "gpu-feature-discovery"),
    ({PRODUCT: "NVIDIA-L4"}, "l4", "gpu-feature-discovery"),
    ({PRODUCT: "NVIDIA-A100-SXM4-40GB"}, "a100-40", "gpu-feature-discovery"),
    ({PRODUCT: "A100-SXM4-40GB"}, "a100-40", "gpu-feature-discovery"),
    ({PRODUCT: "NVIDIA-A100-PCIE-40GB"}, "a100-40-pcie", "gpu-feature-discovery"),
    ({PRODUCT: "NVIDIA-A100-SXM4-80GB"}, "a100-80", "gpu-feature-discovery"),
    ({PRODUCT: "NVIDIA-A100-80GB-PCIe"}, "a100-80-pcie", "gpu-feature-discovery"),
    ({PRODUCT: "NVIDIA-H100-80GB-HBM3"}, "h100-sxm", "gpu-feature-discovery"),
    ({PRODUCT: "NVIDIA-H100-SXM5-80GB"}, "h100-sxm", "gpu-feature-discovery"),
    ({PRODUCT: "NVIDIA-H100-PCIe"}, "h100-pcie", "gpu-feature-discovery"),
    ({"cloud.google.com/gke-accelerator": "nvidia-tesla-t4"}, "t4", "gke"),
    ({"cloud.google.com/gke-accelerator": "nvidia-l4"}, "l4", "gke"),
    ({"cloud.google.com/gke-accelerator": "nvidia-tesla-a100"}, "a100-40", "gke"),
    ({"cloud.google.com/gke-accelerator": "nvidia-a100-80gb"}, "a100-80", "gke"),
    ({"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}, "h100-sxm", "gke"),
    ({"cloud.google.com/gke-accelerator": "nvidia-h100-mega-80gb"}, "h100-sxm", "gke"),
    *(
        (
            {"karpenter.k8s.aws/instance-gpu-name": name, "karpenter.k8s.aws/instance-gpu-memory": memory},
            gpu,
            "karpenter",
        )
        for name, memory, gpu in [
            ("a100", "40960", "a100-40"),
            ("a100", "81920", "a100-80"),
            ("h100", "81920", "h100-sxm"),
            ("l4", "22888", "l4"),
            ("t4", "16384", "t4"),
            ("h200", "144384", "h200"),
        ]
    ),
    ({"k8s.amazonaws.com/accelerator": "nvidia-tesla-t4"}, "t4", "eks"),
    ({"aliyun.accelerator/nvidia_name": "Tesla-V100-SXM2-16GB"}, "v100-sxm", "alibaba"),
    ({"cloud.tencent.com/tke-accelerator": "T4"}, "t4", "tencent"),
    ({"gpu.nvidia.com/class": "A100_PCIE_80GB"}, "a100-80-pcie", "coreweave"),
    ({"gpu.nvidia.com/class": "H100_NVLINK_80GB"}, "h100-sxm", "coreweave"),
    ({"skypilot.co/accelerator": "a100-80gb"}, "a100-80", "skypilot"),
    ({"skypilot.co/accelerator": "t4"}, "t4", "skypilot"),
    *(
        ({TYPE: kind}, gpu, "instance type")
        for kind, gpu in [
            ("p4d.24xlarge", "a100-40"),
            ("p4de.24xlarge", "a100-80"),
            ("p5.48xlarge", "h100-sxm"),
            ("p5.4xlarge", "h100-sxm"),
            ("g6.xlarge", "l4"),
            ("g6.48xlarge", "l4"),
            ("gr6.4xlarge", "l4"),
            ("g4dn.xlarge", "t4"),
            ("g4dn.12xlarge", "t4"),
            ("g4dn.metal", "t4"),
            ("Standard_NC4as_T4_v3", "t4"),
            ("Standard_NC64as_T4_v3", "t4"),
            ("Standard_NC24ads_A100_v4", "a100-80-pcie"),
            ("Standard_NC48ads_A100_v4", "a100-80-pcie"),
            ("Standard_NC96ads_A100_v4", "a100-80-pcie"),
            ("Standard_ND96asr_A100_v4", "a100-40"),
            ("Standard_ND96amsr_A100_v4", "a100-80"),
            ("Standard_NC40ads_H100_v5", "h100-nvl"),
            ("Standard_ND96isr_H100_v5", "h100-sxm"),
            ("a2-highgpu-1g", "a100-40"),
            ("a2-ultragpu-1g", "a100-80"),
            ("g2-standard-4", "l4"),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("labels", "gpu", "layer"), LABELS, ids=["-".join(list(row[0].values())[:2]) for row in LABELS]
)
def test_every_known_label_names_its_gpu(labels: dict[str, str], gpu: str, layer: str) -> None:
    count = list_node_types()[labels[TYPE]].gpus if TYPE in labels else 8
    (pool,) = nodes.discover_pools([node("a", labels, count)]).entries
    assert (pool.pool.gpu.name, pool.pool.layers["gpu"]) == (gpu, layer)
    assert pool.facts["gpu"] == (gpu, layer)


LEFT_OUT: list[tuple[dict[str, str], dict[str, str], str]] = [
    ({PRODUCT: "Tesla-T4-SHARED"}, {}, "SharedGpu"),
    ({PRODUCT: "Tesla-T4", "nvidia.com/gpu.replicas": "4"}, {}, "SharedGpu"),
    ({PRODUCT: "Tesla-T4", "nvidia.com/gpu.sharing-strategy": "mps"}, {}, "SharedGpu"),
    ({PRODUCT: "NVIDIA-A100-SXM4-40GB-MIG-9g.99gb"}, {}, "UnknownAccelerator"),
    ({PRODUCT: "NVIDIA-A100-SXM4-40GB", "nvidia.com/gpu.slices.gi": "1"}, {}, "MigPartitioned"),
    ({PRODUCT: "NVIDIA-A100-SXM4-40GB", "nvidia.com/vgpu.present": "true"}, {}, "VirtualGpu"),
    ({PRODUCT: "NVIDIA-Z900"}, {}, "UnknownAccelerator"),
    ({"karpenter.k8s.aws/instance-gpu-name": "a100"}, {}, "UnknownAccelerator"),
    ({"kubernetes.azure.com/accelerator": "nvidia"}, {}, "UnknownAccelerator"),
    ({"k8s.amazonaws.com/accelerator": "gpu"}, {}, "UnknownAccelerator"),
    ({PRODUCT: "Tesla-T4", "nvidia.com/gpu.sharing-strategy": "time-slicing"}, {}, "SharedGpu"),
]  # fmt: skip


@pytest.mark.parametrize(("labels", "capacity", "code"), LEFT_OUT, ids=["-".join(row[0].values()) for row in LEFT_OUT])
def test_what_is_no_whole_known_gpu_is_left_out_with_a_reason(
    labels: dict[str, str], capacity: dict[str, str], code: str
) -> None:
    report = nodes.discover_pools([node("a", labels, capacity=capacity)])
    assert not report.entries
    (left_out,) = report.left_out
    assert (left_out.code, left_out.nodes) == (code, ("a",))
    assert left_out.message and left_out.remedy
    with pytest.raises(SpecError, match="no usable GPU"):
        report.require_pools()


SINGLE = {
    PRODUCT: "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb",
    "nvidia.com/gpu.multiprocessors": "14",
    "nvidia.com/gpu.slices.gi": "1",
    "nvidia.com/gpu.slices.ci": "1",
    "nvidia.com/mig.strategy": "single",
    TYPE: "p4d.24xlarge",
}
MIXED = {PRODUCT: "NVIDIA-H100-80GB-HBM3", "nvidia.com/mig.strategy": "mixed"}
CUT: list[tuple[dict[str, str], int | None, dict[str, str], str, int]] = [
    (SINGLE, 56, {}, "a100-40-mig-1g.5gb", 56),
    (MIXED, None, {"nvidia.com/mig-3g.40gb": "16"}, "h100-sxm-mig-3g.40gb", 16),
    (MIXED, 0, {"nvidia.com/mig-3g.40gb": "16"}, "h100-sxm-mig-3g.40gb", 16),
    (
        {"cloud.google.com/gke-accelerator": "nvidia-a100-80gb", "cloud.google.com/gke-gpu-partition-size": "2g.20gb"},
        3,
        {},
        "a100-80-mig-2g.20gb",
        3,
    ),
]


@pytest.mark.parametrize(("labels", "gpus", "capacity", "gpu", "count"), CUT, ids=[row[3] for row in CUT])
def test_slices_of_one_profile_are_devices(
    labels: dict[str, str], gpus: int | None, capacity: dict[str, str], gpu: str, count: int
) -> None:
    whole, profile = gpu.split("-mig-")
    report = nodes.discover_pools([node("a", labels, gpus, capacity=capacity)])
    (entry,) = report.entries
    pool = entry.pool
    assert (pool.name, pool.gpu.name, pool.gpu.mig, pool.gpus_per_node) == (gpu, gpu, profile, count)
    assert pool.gpu.memory_bytes < find_gpu(whole).memory_bytes
    assert entry.gpus_total == count
    price = (
        nodes.discover_pools([node("a", {TYPE: labels[TYPE]})]).pools[0].price_per_gpu_hour if TYPE in labels else None
    )
    assert pool.price_per_gpu_hour == (None if price is None else pytest.approx(price / 7))


def test_of_several_profiles_a_pool_chooses_one() -> None:
    mixed = node("a", MIXED, None, capacity={"nvidia.com/mig-1g.10gb": "7", "nvidia.com/mig-3g.40gb": "8"})
    (left_out,) = nodes.discover_pools([mixed]).left_out
    assert left_out.code == "MigPartitioned"
    assert "GPUPool that states mig" in left_out.remedy
    chosen = gpu_pool("small", selector={PRODUCT: MIXED[PRODUCT]}, mig="1g.10gb")
    (pool,) = nodes.discover_pools([mixed], [chosen]).pools
    assert (pool.name, pool.gpu.name, pool.gpus_per_node) == ("small", "h100-sxm-mig-1g.10gb", 7)
    wrong = gpu_pool("small", nodeType="p5.48xlarge", maxNodes=1, mig="1g.5gb")
    assert "1g.10gb" in nodes.discover_pools([], [wrong]).invalid["small"].remedy
    asleep = gpu_pool("small", nodeType="p5.48xlarge", maxNodes=1, mig="1g.10gb")
    (pool,) = nodes.discover_pools([], [asleep]).pools
    assert (pool.gpus_per_node, pool.price_per_gpu_hour) == (56, pytest.approx(_usual("p5.48xlarge") / 7))


def _usual(node_type: str) -> float:
    price = nodes.discover_pools([node("a", {TYPE: node_type})]).pools[0].price_per_gpu_hour
    assert price is not None
    return price


def test_whole_gpus_that_could_be_shared_are_not_left_out() -> None:
    labels = {
        PRODUCT: "NVIDIA-A100-SXM4-40GB",
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.sharing-strategy": "none",
        "nvidia.com/mig.capable": "true",
        "nvidia.com/mig.strategy": "single",
        "nvidia.com/vgpu.present": "false",
    }
    assert [pool.gpu.name for pool in nodes.discover_pools([node("a", labels)]).pools] == ["a100-40"]


def test_other_makers_are_unknown_not_absent() -> None:
    report = nodes.discover_pools([node("a", {}, None, capacity={"amd.com/gpu": "8"})])
    assert [(item.code, item.nodes) for item in report.left_out] == [("UnknownAccelerator", ("a",))]
    assert "amd.com/gpu" in report.left_out[0].message


def test_nodes_without_gpus_are_counted_only() -> None:
    report = nodes.discover_pools([node("a", {TYPE: "m5.large"}, None)])
    assert (report.entries, report.left_out, report.other_nodes) == ((), (), 1)
    with pytest.raises(SpecError, match="none of the 1 nodes has a GPU"):
        report.require_pools()


def test_an_empty_list_says_so() -> None:
    with pytest.raises(SpecError, match="holds no node"):
        nodes.discover_pools([]).require_pools()


def mixed() -> list[dict[str, Any]]:
    return [
        node("h1", {PRODUCT: "NVIDIA-H100-80GB-HBM3", TYPE: "p5.48xlarge"}),
        node("h2", {PRODUCT: "NVIDIA-H100-80GB-HBM3", TYPE: "p5.48xlarge"}),
        node("l1", {PRODUCT: "NVIDIA-L4", TYPE: "g6.xlarge"}, 1),
        node("l8", {PRODUCT: "NVIDIA-L4", TYPE: "g6.48xlarge"}, 8),
        node("s1", {PRODUCT: "NVIDIA-L4", TYPE: "g6.48xlarge", "karpenter.sh/capacity-type": "spot"}, 8),
        node("cpu", {TYPE: "m5.large"}, None),
    ]


def test_shape_and_market_make_separate_pools() -> None:
    pools = {item.pool.name: item for item in nodes.discover_pools(mixed()).entries}
    assert list(pools) == ["h100-sxm", "l4-1x", "l4-8x", "l4-spot"]
    assert pools["h100-sxm"].nodes == 2 and pools["h100-sxm"].gpus_total == 16
    assert pools["l4-8x"].pool.price_per_gpu_hour == pytest.approx(13.3504 / 8)
    assert pools["l4-spot"].pool.price_per_gpu_hour is None, "a list price does not hold for spot"


def test_selectors_select_exactly_their_pool() -> None:
    everyone = mixed()
    for item in nodes.discover_pools(everyone).entries:
        selector = item.pool.node_selector
        chosen = [one for one in everyone if selector.items() <= one["metadata"]["labels"].items()]
        expected = item.nodes if item.pool.name != "l4-8x" else 2
        assert len(chosen) == expected, f"{item.pool.name}: no label tells on-demand nodes from spot nodes"
        assert len(selector) <= 2


def test_order_does_not_matter() -> None:
    first = nodes.discover_pools(mixed()).entries
    for order in list(permutations(mixed()))[::97]:
        assert nodes.discover_pools(order).entries == first


def test_taints_become_tolerations_but_passing_states_do_not() -> None:
    taints = [
        {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},
        {"key": "dedicated", "effect": "NoExecute"},
        {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"},
        {"key": "soft", "effect": "PreferNoSchedule"},
    ]
    (pool,) = nodes.discover_pools([node("a", {PRODUCT: "Tesla-T4"}, taints=taints)]).entries
    assert pool.pool.tolerations == (
        {"key": "dedicated", "operator": "Exists", "effect": "NoExecute"},
        {"key": "nvidia.com/gpu", "operator": "Equal", "value": "present", "effect": "NoSchedule"},
    )


def test_links_come_from_type_label_or_a_stated_default() -> None:
    by_type = nodes.discover_pools([node("a", {TYPE: "p4d.24xlarge"})]).entries[0]
    assert by_type.facts["interNode"] == ("efa-400", "instance type")
    labels = {
        "karpenter.k8s.aws/instance-gpu-name": "t4",
        "karpenter.k8s.aws/instance-network-bandwidth": "50000",
        TYPE: "g99.large",
    }
    by_label = nodes.discover_pools([node("a", labels)]).entries[0]
    assert by_label.facts["interNode"] == ("ethernet-50", "karpenter")
    assert by_label.pool.inter.bandwidth_bytes_per_s == 6.25e9
    assumed = nodes.discover_pools([node("a", {PRODUCT: "NVIDIA-H100-80GB-HBM3"})]).entries[0]
    assert assumed.facts["interNode"] == ("infiniband-ndr-8x400", "default")
    single = nodes.discover_pools([node("a", {PRODUCT: "NVIDIA-H100-80GB-HBM3"}, 1)]).entries[0]
    assert single.facts["interNode"] == ("ethernet-25", "default")


def rack(name: str, clique: str) -> dict[str, Any]:
    labels = gfd("NVIDIA-GB200", "189471", "blackwell", "10.0", **{"nvidia.com/gpu.clique": clique})
    return node(name, labels, 4)


@pytest.mark.parametrize(
    ("cliques", "domain", "layer"),
    [
        ([""] * 20, 72, "gpu"),
        (["rack.0"] * 4, 72, "gpu"),
        (["rack.0"] * 9 + ["rack.1"] * 7, 36, "nvidia.com/gpu.clique"),
        (["rack.0"] * 36, 144, "nvidia.com/gpu.clique"),
    ],
)
def test_cliques_say_how_many_gpus_share_nvlink(cliques: list[str], domain: int, layer: str) -> None:
    rows = [rack(f"n{index}", clique) for index, clique in enumerate(cliques)]
    (pool,) = nodes.discover_pools(rows).entries
    assert pool.facts["nvlinkDomain"] == (str(domain), layer)
    assert (pool.pool.domain, pool.pool.gpus_per_node) == (domain, 4)
    asked = gpu_pool("mine", selector={PRODUCT: "NVIDIA-GB200"}, gpu={"name": "gb200"})
    assert nodes.discover_pools(rows, [asked]).entries[0].pool.domain == domain
    asked["spec"]["links"] = {"nvlinkDomain": 8}
    (mine,) = nodes.discover_pools(rows, [asked]).entries
    assert (mine.facts["nvlinkDomain"], mine.pool.domain) == (("8", "override"), 8)


@pytest.mark.parametrize(
    ("gpu", "count", "network"),
    [
        ("gb200", 4, "infiniband-ndr-4x400"),
        ("gb300", 4, "infiniband-xdr-4x800"),
        ("v100-sxm3", 16, "infiniband-edr-8x100"),
        ("h800-sxm", 8, "infiniband-ndr-8x400"),
        ("rtx-3090", 8, "ethernet-25"),
    ],
)
def test_a_gpu_comes_in_nodes_of_its_makers_system(gpu: str, count: int, network: str) -> None:
    assert find_default_gpus_per_node(find_gpu(gpu)) == count
    assert find_default_network(find_gpu(gpu), count).name == network


def test_a_link_that_ends_in_the_node_has_no_domain() -> None:
    (pool,) = nodes.discover_pools([node("a", gfd("NVIDIA-H100-80GB-HBM3", "81559", "hopper", "9.0"))]).entries
    assert "nvlinkDomain" not in pool.facts
    asked = gpu_pool("l4", gpu={"name": "l4"}, gpusPerNode=8, maxNodes=2, links={"nvlinkDomain": 16})
    error = nodes.discover_pools([], [asked]).invalid["l4"]
    assert str(error).startswith("spec.links.nvlinkDomain: pcie4 does not reach across nodes; drop it")


def test_a_users_pool_takes_its_nodes_and_wins() -> None:
    mine = gpu_pool("mine", selector={TYPE: "p5.48xlarge"}, price={"perGpuHour": 2.0}, maxNodes=10)
    pools = {item.pool.name: item for item in nodes.discover_pools(mixed(), [mine]).entries}
    assert list(pools) == ["mine", "l4-1x", "l4-8x", "l4-spot"]
    pool = pools["mine"].pool
    assert (pool.gpu.name, pool.max_nodes, pool.price_per_gpu_hour) == ("h100-sxm", 10, 2.0)
    assert (pools["mine"].nodes, pools["mine"].facts["price"]) == (2, ("2 USD", "override"))
    assert pool.inter.name == "efa-3200", "what the user left open comes from the nodes"


def test_a_users_pool_names_an_unknown_gpu() -> None:
    unknown = node("a", {PRODUCT: "NVIDIA-Z900", "rack": "7"})
    mine = gpu_pool("mine", selector={"rack": "7"}, gpu={"name": "t4"})
    (pool,) = nodes.discover_pools([unknown], [mine]).entries
    assert (pool.pool.gpu.name, pool.facts["gpu"]) == ("t4", ("t4", "override"))


def test_spot_price_holds_for_spot_nodes_only() -> None:
    mine = gpu_pool("cheap", selector={"karpenter.sh/capacity-type": "spot"}, price={"perGpuHour": 2.0, "spot": 0.5})
    pools = {item.pool.name: item.pool for item in nodes.discover_pools(mixed(), [mine]).entries}
    assert pools["cheap"].price_per_gpu_hour == 0.5


def test_a_free_pool_and_one_scaled_to_nothing() -> None:
    mine = gpu_pool("mine", selector={TYPE: "p5.48xlarge"}, price={"perGpuHour": 0}, maxNodes=0)
    later = gpu_pool("later", nodeType="p4d.24xlarge", maxNodes=0)
    pools = {item.pool.name: item for item in nodes.discover_pools(mixed(), [mine, later]).entries}
    assert (pools["mine"].pool.price_per_gpu_hour, pools["mine"].facts["price"]) == (0.0, ("0 USD", "override"))
    assert (pools["mine"].nodes, pools["mine"].pool.max_gpus) == (2, 0)
    assert (pools["later"].nodes, pools["later"].gpus_total, pools["later"].pool.max_gpus) == (0, 0, 0)


def test_a_wrong_pool_does_not_spoil_the_others() -> None:
    report = nodes.discover_pools(mixed(), [gpu_pool("bad", gpu={"name": "h101"}, gpusPerNode=1, maxNodes=1)])
    assert list(report.invalid) == ["bad"] and len(report.entries) == 4
    with pytest.raises(SpecError, match=r"GPUPool bad: spec\.gpu\.name"):
        report.require_pools()


def test_parse_takes_what_kubectl_prints() -> None:
    text = """{"apiVersion": "v1", "kind": "List", "items": [
      {"kind": "Node", "metadata": {"name": "a"}}, {"kind": "GPUPool", "metadata": {"name": "b"}}]}"""
    members, own, slices = nodes.parse_objects(text)
    assert [item["metadata"]["name"] for item in members + own] == ["a", "b"] and not slices
    with pytest.raises(SpecError, match="kind 'Pod' is not a node"):
        nodes.parse_objects("kind: Pod")


@pytest.mark.parametrize(
    "document",
    [
        {"metadata": "x"},
        {"metadata": {"labels": ["a"]}},
        {"status": {"capacity": 3}},
        {"spec": {"taints": "x"}},
        {"spec": {"taints": ["x"]}},
    ],
)
def test_misshapen_nodes_are_one_line(document: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        nodes.discover_pools([document])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_example_clusters_hold_known_gpus_only(path: Path) -> None:
    report = nodes.discover_pools(*nodes.parse_objects(path.read_text(encoding="utf-8")))
    assert report.require_pools() and not report.left_out


def test_instance_types_name_known_gpus_and_plausible_prices() -> None:
    for kind in list_node_types().values():
        assert find_gpu(kind.gpu).name == kind.gpu
        assert 1 <= kind.gpus <= 16
        assert kind.price_per_gpu_hour is None or 0.1 < kind.price_per_gpu_hour < 20


def test_every_shipped_product_string_is_found_again() -> None:
    for gpu in list_gpus().values():
        label = gpu.product.replace(" ", "-")
        assert [pool.gpu.name for pool in nodes.discover_pools([node("a", {PRODUCT: label})]).pools] == [gpu.name]


KEYS = [PRODUCT, TYPE, "nvidia.com/gpu.replicas", "nvidia.com/gpu.count", "karpenter.k8s.aws/instance-gpu-name"]


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.dictionaries(
                st.sampled_from(KEYS),
                st.sampled_from(["Tesla-T4", "NVIDIA-L4", "1", "8", "l4", "g6.xlarge", "p5.48xlarge"])
                | st.text(max_size=8),
            ),
            st.none() | st.integers(0, 16),
        ),
        max_size=8,
    )
)
@pytest.mark.slow
def test_every_node_ends_in_exactly_one_place(rows: list[tuple[dict[str, str], int | None]]) -> None:
    documents = [node(f"n{index}", labels, count) for index, (labels, count) in enumerate(rows)]
    report = nodes.discover_pools(documents)
    placed = sum(item.nodes for item in report.entries)
    left = sum(len(item.nodes) for item in report.left_out)
    assert placed + left + report.other_nodes == len(rows)
    names = [pool.name for pool in report.pools]
    assert len(set(names)) == len(names)


def test_a_product_that_nobody_knows_is_not_the_gpu_of_the_instance_type() -> None:
    """An unknown product once joined the pool of the H100s silently."""
    members = [node(name, {TYPE: "p5.48xlarge", PRODUCT: product}) for name, product in (
        ("known", "NVIDIA-H100-80GB-HBM3"), ("riddle", "NVIDIA-Z900-SXM9"),
    )]  # fmt: skip
    report = nodes.discover_pools([*members, node("unlabelled", {TYPE: "p5.48xlarge"})])
    assert [sorted(entry.members) for entry in report.entries] == [["known", "unlabelled"]]
    ((left_out),) = report.left_out
    assert (left_out.code, left_out.nodes) == ("UnknownAccelerator", ("riddle",))
    assert "NVIDIA-Z900-SXM9" in left_out.message and "not the h100-sxm of instance type" in left_out.message


def test_a_label_that_names_no_product_leaves_the_instance_type_to_say_which_gpu_it_is() -> None:
    for label in ("kubernetes.azure.com/accelerator", "k8s.amazonaws.com/accelerator"):
        (entry,) = nodes.discover_pools([node("a", {TYPE: "p5.48xlarge", label: "nvidia"})]).entries
        assert entry.pool.gpu.name == "h100-sxm"
