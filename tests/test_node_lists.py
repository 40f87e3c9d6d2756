"""Node lists as clusters print them, vendor by vendor: which GPUs count, which do not, and the remarks."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from tilecast import nodes
from tilecast.cli import main
from tilecast.hardware.instances import list_node_types
from tilecast.spec import SpecError

TYPE = "node.kubernetes.io/instance-type"
PRODUCT = "nvidia.com/gpu.product"
GPU = "nvidia.com/gpu"
GPU_TAINT = {"key": GPU, "value": "present", "effect": "NoSchedule"}


def listed(
    name: str,
    labels: dict[str, str],
    devices: dict[str, int],
    *,
    usable: dict[str, int] | None = None,
    ready: str = "True",
    cordoned: bool = False,
    taints: tuple[dict[str, str], ...] = (),
) -> dict[str, Any]:
    """Return a Node as `kubectl get nodes -o yaml` prints it."""
    base = {"cpu": "96", "ephemeral-storage": "1048563692Ki", "memory": "1055761848Ki", "pods": "110"}
    conditions = [
        {"type": "MemoryPressure", "status": "False", "reason": "KubeletHasSufficientMemory"},
        {"type": "DiskPressure", "status": "False", "reason": "KubeletHasNoDiskPressure"},
        {"type": "Ready", "status": ready, "reason": "KubeletReady" if ready == "True" else "NodeStatusUnknown"},
    ]
    result = list(taints)
    if cordoned:
        result.append({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"})
    if ready != "True":
        result.append({"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"})
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/arch": "amd64", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
            | labels,
        },
        "spec": {"providerID": f"cloud:///{name}"}
        | ({"unschedulable": True} if cordoned else {})
        | ({"taints": result} if result else {}),
        "status": {
            "capacity": base | {key: str(value) for key, value in devices.items()},
            "allocatable": base | {key: str(value) for key, value in {**devices, **(usable or {})}.items()},
            "conditions": conditions,
            "nodeInfo": {"kubeletVersion": "v1.33.4", "operatingSystem": "linux"},
        },
    }


def gfd(product: str, count: int, memory: str, **more: str) -> dict[str, str]:
    """Return the labels that the GPU operator adds to a node."""
    return {
        "nvidia.com/gpu.present": "true",
        PRODUCT: product,
        "nvidia.com/gpu.count": str(count),
        "nvidia.com/gpu.memory": memory,
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.sharing-strategy": "none",
        "nvidia.com/gpu.mode": "compute",
        "nvidia.com/mig.capable": "true",
        "nvidia.com/mig.strategy": "single",
        "nvidia.com/vgpu.present": "false",
        **more,
    }


def gke(accelerator: str, machine: str, count: int, **more: str) -> dict[str, str]:
    prefix = "cloud.google.com/"
    return {
        TYPE: machine,
        f"{prefix}gke-accelerator": accelerator,
        f"{prefix}gke-accelerator-count": str(count),
        f"{prefix}gke-gpu-driver-version": "latest",
        f"{prefix}gke-nodepool": "gpus",
        **{f"{prefix}{key.replace('_', '-')}": value for key, value in more.items()},
    }


H100 = gfd("NVIDIA-H100-80GB-HBM3", 8, "81559")
GB200 = gfd("NVIDIA-GB200", 4, "189471", **{"kubernetes.io/arch": "arm64"})


def rack(name: str, clique: str) -> dict[str, Any]:
    return listed(name, GB200 | {"nvidia.com/gpu.clique": clique}, {GPU: 4})


@dataclass(frozen=True)
class Case:
    """A list of nodes, and the pools and remarks expected of it."""

    nodes: list[dict[str, Any]]
    pools: dict[str, tuple[str, int, int, str]] = field(default_factory=dict)
    """GPU, usable nodes, GPUs per node and network, by the name of the pool."""
    left_out: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    """Beginnings of the remarks, in order."""


def times(count: int, labels: dict[str, str], devices: dict[str, int], **more: Any) -> list[dict[str, Any]]:
    return [listed(f"n{index}", labels, devices, **more) for index in range(count)]


EKS_AUTO = {
    "eks.amazonaws.com/compute-type": "auto",
    "eks.amazonaws.com/instance-gpu-name": "h100",
    "eks.amazonaws.com/instance-gpu-count": "8",
    "eks.amazonaws.com/instance-gpu-memory": "81920",
    "eks.amazonaws.com/instance-network-bandwidth": "3200000",
}
ALL_TAINTED = "all nodes are tainted nvidia.com/gpu=present:NoSchedule, which a job has to tolerate"

CASES: dict[str, Case] = {
    "gke": Case(
        times(2, gke("nvidia-l4", "g2-standard-48", 4), {GPU: 4}, taints=(GPU_TAINT,)),
        {"l4": ("l4", 2, 4, "ethernet-50")},
        remarks=(ALL_TAINTED,),
    ),
    "gke-n1": Case(times(2, gke("nvidia-tesla-t4", "n1-standard-8", 1), {GPU: 1}), {"t4": ("t4", 2, 1, "ethernet-25")}),
    "gke-h200": Case(
        times(2, gke("nvidia-h200-141gb", "a3-ultragpu-8g", 8), {GPU: 8}), {"h200": ("h200", 2, 8, "roce-3200")}
    ),
    "gke-gb200": Case(
        times(18, gke("nvidia-gb200", "a4x-highgpu-4g", 4), {GPU: 4}), {"gb200": ("gb200", 18, 4, "roce-4x400")}
    ),
    "gke-time-sharing": Case(
        times(
            3,
            gke(
                "nvidia-l4",
                "g2-standard-48",
                4,
                gke_gpu_sharing_strategy="time-sharing",
                gke_max_shared_clients_per_gpu="8",
            ),
            {GPU: 32},
        ),
        left_out=("SharedGpu",),
    ),
    "gke-mps": Case(
        times(1, gke("nvidia-l4", "g2-standard-4", 1, gke_gpu_sharing_strategy="mps"), {GPU: 4}),
        left_out=("SharedGpu",),
    ),
    "gke-partition": Case(
        times(2, gke("nvidia-tesla-a100", "a2-highgpu-1g", 1, gke_gpu_partition_size="1g.5gb"), {GPU: 7}),
        {"a100-40-mig-1g.5gb": ("a100-40-mig-1g.5gb", 2, 7, "ethernet-24")},
    ),
    "gke-tpu": Case(
        times(
            1, {"cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice", TYPE: "ct5p-hightpu-4t"}, {"google.com/tpu": 4}
        ),
        left_out=("UnknownAccelerator",),
    ),
    "eks": Case(times(2, {TYPE: "p4d.24xlarge"}, {GPU: 8}), {"a100-40": ("a100-40", 2, 8, "efa-400")}),
    "eks-auto": Case(times(2, EKS_AUTO, {GPU: 8}), {"h100-sxm": ("h100-sxm", 2, 8, "ethernet-3200")}),
    "eks-part-of-a-gpu": Case(times(1, {TYPE: "g6f.xlarge"}, {GPU: 1}), left_out=("VirtualGpu",)),
    "eks-neuron": Case(
        times(1, {TYPE: "trn1.32xlarge"}, {"aws.amazon.com/neuron": 16, "aws.amazon.com/neuroncore": 32}),
        left_out=("UnknownAccelerator",),
    ),
    "aks": Case(
        times(2, {TYPE: "Standard_ND96isr_H100_v5", "kubernetes.azure.com/accelerator": "nvidia"}, {GPU: 8}),
        {"h100-sxm": ("h100-sxm", 2, 8, "infiniband-ndr-8x400")},
    ),
    "aks-virtual": Case(
        times(1, {TYPE: "Standard_NV6ads_A10_v5", "kubernetes.azure.com/accelerator": "nvidia"}, {GPU: 1}),
        left_out=("VirtualGpu",),
    ),
    "aks-unknown-size": Case(
        times(1, {TYPE: "Standard_NX1_v9", "kubernetes.azure.com/accelerator": "nvidia"}, {GPU: 1}),
        left_out=("UnknownAccelerator",),
    ),
    "oke": Case(times(2, {TYPE: "bm.gpu.h100.8"}, {GPU: 8}), {"h100-sxm": ("h100-sxm", 2, 8, "roce-3200")}),
    "oke-a10": Case(times(1, {TYPE: "VM.GPU.A10.2"}, {GPU: 2}), {"a10": ("a10", 1, 2, "ethernet-25")}),
    "oke-amd": Case(times(1, {TYPE: "BM.GPU.MI300X.8"}, {"amd.com/gpu": 8}), left_out=("UnknownAccelerator",)),
    "nebius": Case(
        times(2, {TYPE: "gpu-h100-sxm"}, {GPU: 8}), {"h100-sxm": ("h100-sxm", 2, 8, "infiniband-ndr-8x400")}
    ),
    "nebius-one-gpu": Case(times(2, {TYPE: "gpu-h100-sxm"}, {GPU: 1}), {"h100-sxm": ("h100-sxm", 2, 1, "ethernet-25")}),
    "coreweave": Case(
        times(2, {TYPE: "gd-8xh200ib-i128", "gpu.nvidia.com/model": "H200", "gpu.nvidia.com/count": "8"}, {GPU: 8}),
        {"h200": ("h200", 2, 8, "infiniband-ndr-8x400")},
    ),
    "coreweave-gb200": Case(
        times(18, {TYPE: "gb200-4x", "gpu.nvidia.com/class": "GB200"}, {GPU: 4}),
        {"gb200": ("gb200", 18, 4, "infiniband-ndr-4x400")},
    ),
    "lambda": Case(
        times(2, H100 | {TYPE: "gpu_8x_h100_sxm5"}, {GPU: 8}), {"h100-sxm": ("h100-sxm", 2, 8, "infiniband-ndr-8x400")}
    ),
    "on-premises": Case(
        times(4, gfd("NVIDIA-RTX-6000-Ada-Generation", 4, "49140"), {GPU: 4}),
        {"rtx-6000-ada": ("rtx-6000-ada", 4, 4, "ethernet-25")},
    ),
    "old-driver": Case(
        times(1, {PRODUCT: "A100-SXM4-40GB", "nvidia.com/gpu.memory": "40536"}, {GPU: 8}),
        {"a100-40": ("a100-40", 1, 8, "infiniband-hdr-8x200")},
    ),
    "one-rack": Case(
        [rack(f"n{index}", "uuid.1") for index in range(18)], {"gb200": ("gb200", 18, 4, "infiniband-ndr-4x400")}
    ),
    "shared": Case(
        times(
            1,
            gfd("NVIDIA-A100-SXM4-80GB-SHARED", 8, "81920")
            | {"nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.sharing-strategy": "time-slicing"},
            {GPU: 32},
        ),
        left_out=("SharedGpu",),
    ),
    "shared-under-another-name": Case(
        times(1, {TYPE: "p4d.24xlarge"}, {"nvidia.com/gpu.shared": 32}), left_out=("SharedGpu",)
    ),
    "shared-slices": Case(
        times(1, {PRODUCT: "NVIDIA-A100-SXM4-80GB"}, {"nvidia.com/mig-1g.10gb.shared": 14}), left_out=("SharedGpu",)
    ),
    "shared-without-a-label": Case(times(1, {TYPE: "Standard_NC24ads_A100_v4"}, {GPU: 10}), left_out=("SharedGpu",)),
    "more-than-gfd-counts": Case(times(1, H100, {GPU: 80}), left_out=("SharedGpu",)),
    "virtual-by-name": Case(times(1, gfd("NVIDIA-A10-24Q", 1, "24512"), {GPU: 1}), left_out=("VirtualGpu",)),
    "virtual-grid": Case(times(1, gfd("GRID-A100-10C", 1, "10240"), {GPU: 1}), left_out=("VirtualGpu",)),
    "for-virtual-machines": Case(
        times(
            1,
            {PRODUCT: "NVIDIA-L40S", "nvidia.com/gpu.workload.config": "vm-passthrough"},
            {"nvidia.com/AD102GL_L40S": 4},
        ),
        left_out=("VirtualGpu",),
    ),
    "mig-single": Case(
        times(1, gfd("NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", 56, "9984"), {GPU: 56}),
        {"h100-sxm-mig-1g.10gb": ("h100-sxm-mig-1g.10gb", 1, 56, "ethernet-25")},
    ),
    "mig-media": Case(
        times(1, H100 | {"nvidia.com/mig.strategy": "mixed"}, {"nvidia.com/mig-1g.10gb.me": 8, GPU: 0}),
        {"h100-sxm-mig-1g.10gb": ("h100-sxm-mig-1g.10gb", 1, 8, "ethernet-25")},
    ),
    "mig-without-facts": Case(
        times(1, gfd("NVIDIA-B200-MIG-1g.23gb", 56, "23552"), {GPU: 56}), left_out=("UnknownAccelerator",)
    ),
    "mig-resource-without-facts": Case(
        times(1, gfd("NVIDIA-B200", 8, "183359"), {"nvidia.com/mig-1g.23gb": 56}), left_out=("MigPartitioned",)
    ),
    "mig-mixed": Case(
        times(
            1, H100 | {"nvidia.com/mig.strategy": "mixed"}, {"nvidia.com/mig-1g.10gb": 14, "nvidia.com/mig-3g.40gb": 8}
        ),
        left_out=("MigPartitioned",),
    ),
    "mig-on-some-gpus": Case(
        times(1, H100 | {"nvidia.com/mig.strategy": "mixed"}, {GPU: 4, "nvidia.com/mig-1g.10gb": 28}),
        {"h100-sxm": ("h100-sxm", 1, 4, "infiniband-ndr-8x400")},
        remarks=("its only node (n0) is cut in part (28 x 1g.10gb): only whole GPUs are counted",),
    ),
    "gaudi": Case(times(1, {TYPE: "dl1.24xlarge"}, {"habana.ai/gaudi": 8}), left_out=("UnknownAccelerator",)),
    "ascend": Case(times(1, {}, {"huawei.com/Ascend910": 8}), left_out=("UnknownAccelerator",)),
    "amd-graphics-beside-nvidia": Case(
        times(1, H100, {GPU: 8, "amd.com/gpu": 1}), {"h100-sxm": ("h100-sxm", 1, 8, "infiniband-ndr-8x400")}
    ),
    "no-driver": Case(times(2, {"nvidia.com/gpu.present": "true"}, {}), left_out=("UnknownAccelerator",)),
    "no-device-plugin": Case(
        times(2, {TYPE: "p5.48xlarge"}, {}),
        {"h100-sxm": ("h100-sxm", 2, 8, "efa-3200")},
        remarks=(
            "all 2 nodes (n0, n1) are without nvidia.com/gpu: no device plugin offers it; counted by instance type",
        ),
    ),
    "no-healthy-gpu": Case(
        [listed("n0", H100, {GPU: 8}), listed("n1", H100, {GPU: 0})],
        {"h100-sxm": ("h100-sxm", 1, 8, "infiniband-ndr-8x400")},
        remarks=("1 of 2 nodes (n1) is short of GPUs (pods may use 0 of 8) and not counted",),
    ),
    "cordoned": Case(
        [*times(3, H100, {GPU: 8}), listed("c", H100, {GPU: 8}, cordoned=True)],
        {"h100-sxm": ("h100-sxm", 3, 8, "infiniband-ndr-8x400")},
        remarks=("1 of 4 nodes (c) is cordoned and not counted",),
    ),
    "not-ready": Case(
        [
            *times(2, H100, {GPU: 8}),
            *(listed(name, H100, {GPU: 8}, ready=how) for name, how in (("a", "False"), ("b", "Unknown"))),
        ],
        {"h100-sxm": ("h100-sxm", 2, 8, "infiniband-ndr-8x400")},
        remarks=("2 of 4 nodes (a, b) are not ready and not counted",),
    ),
    "leaving": Case(
        [
            *times(1, H100, {GPU: 8}),
            listed("gone", H100, {GPU: 8}, taints=({"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"},)),
        ],
        {"h100-sxm": ("h100-sxm", 1, 8, "infiniband-ndr-8x400")},
        remarks=("1 of 2 nodes (gone) is tainted ToBeDeletedByClusterAutoscaler and not counted",),
    ),
    "tainted-in-part": Case(
        [
            *times(3, H100, {GPU: 8}),
            listed("ml", H100, {GPU: 8}, taints=({"key": "dedicated", "value": "ml", "effect": "NoSchedule"},)),
        ],
        {"h100-sxm": ("h100-sxm", 4, 8, "infiniband-ndr-8x400")},
        remarks=("1 of 4 nodes is tainted dedicated=ml:NoSchedule, which a job has to tolerate",),
    ),
    "short-of-gpus": Case(
        [*times(3, H100, {GPU: 8}), listed("s", H100, {GPU: 8}, usable={GPU: 6})],
        {"h100-sxm": ("h100-sxm", 3, 8, "infiniband-ndr-8x400")},
        remarks=("1 of 4 nodes (s) is short of GPUs (pods may use 6 of 8) and not counted",),
    ),
    "all-short-of-gpus": Case(
        times(2, H100, {GPU: 8}, usable={GPU: 6}),
        {"h100-sxm": ("h100-sxm", 2, 6, "infiniband-ndr-8x400")},
        remarks=("pods may use 6 of the 8 GPUs of a node; so many are counted",),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_list_counts_as_what_it_is(case: Case) -> None:
    report = nodes.discover_pools(case.nodes, usable_only=True)
    pools = {
        item.pool.name: (item.pool.gpu.name, item.pool.max_nodes, item.pool.gpus_per_node, item.pool.inter.name)
        for item in report.entries
    }
    assert pools == case.pools
    assert tuple(item.code for item in report.left_out) == case.left_out
    remarks = [remark for item in report.entries for remark in item.remarks]
    assert len(remarks) == len(case.remarks), remarks
    assert all(text.startswith(beginning) for text, beginning in zip(remarks, case.remarks, strict=True)), remarks
    placed = sum(item.nodes for item in report.entries) + sum(len(item.nodes) for item in report.left_out)
    assert placed + report.other_nodes == len(case.nodes)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_a_cluster_has_does_not_change_with_the_hour(case: Case) -> None:
    had = nodes.discover_pools(case.nodes)
    for item in had.entries:
        assert item.pool.max_nodes == item.nodes
        assert not any(remark.endswith("and not counted") for remark in item.remarks)
    now = nodes.discover_pools(case.nodes, usable_only=True)
    assert [item.pool.name for item in now.entries] == [item.pool.name for item in had.entries]
    assert all(few.pool.max_gpus <= many.pool.max_gpus for few, many in zip(now.entries, had.entries, strict=True))


def test_a_machine_with_gpus_as_an_extra_costs_both() -> None:
    (pool,) = nodes.discover_pools(times(2, gke("nvidia-tesla-t4", "n1-standard-8", 2), {GPU: 2})).entries
    assert pool.pool.price_per_gpu_hour == pytest.approx((0.379998 + 2 * 0.35) / 2)
    document = nodes.gpupool_document(pool)
    assert document is not None
    assert (
        nodes.discover_pools([], [document]).pools
        == nodes.discover_pools(times(2, gke("nvidia-tesla-t4", "n1-standard-8", 2), {GPU: 2})).pools
    )
    (unpriced,) = nodes.discover_pools(times(1, gke("nvidia-tesla-t4", "n1-custom-6-23040", 1), {GPU: 1})).entries
    assert unpriced.pool.price_per_gpu_hour is None


def test_whole_gpus_are_not_selected_with_shared_ones() -> None:
    whole = times(2, gke("nvidia-l4", "g2-standard-48", 4), {GPU: 4})
    shared = [
        listed(
            f"s{index}",
            gke("nvidia-l4", "g2-standard-48", 4, gke_gpu_sharing_strategy="mps", gke_nodepool="s"),
            {GPU: 8},
        )
        for index in range(2)
    ]
    (pool,) = nodes.discover_pools([*whole, *shared]).entries
    assert pool.pool.node_selector == {"cloud.google.com/gke-nodepool": "gpus"}
    (alone,) = nodes.discover_pools(whole).entries
    assert alone.pool.node_selector == {"cloud.google.com/gke-accelerator": "nvidia-l4"}


def test_every_left_out_node_has_a_reason_and_a_remedy() -> None:
    for case in CASES.values():
        for item in nodes.discover_pools(case.nodes, usable_only=True).left_out:
            assert item.message and item.remedy and "\n" not in item.message + item.remedy


def test_nothing_usable_is_one_line_that_says_why() -> None:
    gone = times(2, H100, {GPU: 8}, cordoned=True)
    with pytest.raises(SpecError, match=r"no usable GPU: pool h100-sxm: all 2 nodes \(n0, n1\) are cordoned"):
        nodes.discover_pools(gone, usable_only=True).require_pools()
    assert nodes.discover_pools(gone).require_pools()[0].max_nodes == 2


def test_a_users_word_on_the_size_stands() -> None:
    spec = {"selector": {PRODUCT: H100[PRODUCT]}, "maxNodes": 4}
    pool = {"apiVersion": "tilecast.dev/v1alpha1", "kind": "GPUPool", "metadata": {"name": "mine"}, "spec": spec}
    everyone = CASES["cordoned"].nodes
    (entry,) = nodes.discover_pools(everyone, [pool], usable_only=True).entries
    assert entry.pool.max_nodes == 4 and entry.remarks == ("1 of 4 nodes (c) is cordoned",)
    del spec["maxNodes"]
    (entry,) = nodes.discover_pools(everyone, [pool], usable_only=True).entries
    assert entry.pool.max_nodes == 3


def test_a_remembered_pool_counts_nodes_that_may_come_but_not_those_that_cannot_be_used() -> None:
    memory = [
        document
        for item in nodes.discover_pools(times(6, H100, {GPU: 8})).entries
        if (document := nodes.gpupool_document(item))
    ]
    everyone = CASES["cordoned"].nodes
    (pool,) = nodes.discover_pools(everyone, memory, usable_only=True).entries
    assert (pool.pool.max_nodes, pool.nodes, pool.unusable) == (5, 4, 1)
    assert nodes.discover_pools(everyone, memory).entries[0].pool.max_nodes == 6


def test_a_cordoned_node_leaves_its_nvlink_domain() -> None:
    rows = [rack(f"a{index}", "uuid.1") for index in range(18)] + [rack(f"b{index}", "uuid.2") for index in range(9)]
    assert nodes.discover_pools(rows, usable_only=True).entries[0].pool.domain == 72
    for row in rows[:12]:
        row["spec"]["unschedulable"] = True
    assert nodes.discover_pools(rows, usable_only=True).entries[0].pool.domain == 36


def test_an_ultraserver_is_a_domain_of_its_own() -> None:
    rows = [
        listed(
            f"n{index}", {TYPE: "p6e-gb200.36xlarge", "topology.k8s.aws/ultraserver-id": f"us-{index // 9}"}, {GPU: 4}
        )
        for index in range(18)
    ]
    (pool,) = nodes.discover_pools(rows, usable_only=True).entries
    assert pool.facts["nvlinkDomain"] == ("36", "topology.k8s.aws/ultraserver-id")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    assert main(list(words)) == 0
    text = capsys.readouterr()
    return text.out, text.err


def written(tmp_path: Path, rows: list[dict[str, Any]]) -> str:
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": rows}))
    return str(path)


def test_the_first_screen_says_which_nodes_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = CASES["gke-time-sharing"].nodes
    for index, row in enumerate(shared):
        row["metadata"]["name"] = f"shared-{index}"
    path = written(tmp_path, [*CASES["cordoned"].nodes, *shared])
    job = ("advise", "gpt2", "--seq", "1024", "--batch", "48", "--nodes", path)
    out, err = run(capsys, *job)
    assert "h100-sxm: 1 of 4 nodes (c) is cordoned and not counted." in out
    assert "Assumed: infiniband-ndr-8x400 between nodes of h100-sxm" in out
    assert "left out 3 nodes: the GPUs are shared between pods (cloud.google.com/gke-gpu-sharing-strategy" in err
    notes = json.loads(run(capsys, *job, "-o", "json")[0])["notes"]
    assert any("cordoned" in note for note in notes)
    table = run(capsys, "show", "pools", "--nodes", path)[0]
    assert "3x8" in table and "cordoned" in table and "SharedGpu" in table


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        (
            "a100-40:16",
            "a100-40 2 nodes of 8, nvlink3 inside, infiniband-hdr-8x200 between, priced as Standard_ND96asr_v4",
        ),
        (
            "gb200:72",
            "gb200 18 nodes of 4, nvlink5-nvl72 over 72 GPUs, infiniband-ndr-4x400 beyond, priced as gb200-4x",
        ),
        (
            "gb300:144",
            "gb300 36 nodes of 4, nvlink5-nvl72 over 72 GPUs, infiniband-xdr-4x800 beyond, priced as BM.GPU.GB300.4",
        ),
        ("h100-sxm:4", "h100-sxm 1 node of 4, nvlink4 inside, priced as gd-8xh100ib-i128"),
        ("rtx-4090:16", "rtx-4090 2 nodes of 8, pcie4 inside, ethernet-25 between"),
    ],
)
def test_the_first_screen_says_what_a_bare_count_assumes(
    gpus: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = run(capsys, "advise", "gpt2", "--seq", "1024", "--batch", "144", "--gpus", gpus)
    assert f"Assumed of --gpus: {text}. Give --nodes FILE for nodes of your own." in " ".join(out.split())


def test_the_assumption_is_told_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "llama-3-70b", "--seq", "4096", "--batch", "16", "--gpus", "l40:8"]) == 3
    assert "Assumed of --gpus: l40 1 node of 8" in capsys.readouterr().out


def test_prices_and_networks_of_instance_types_have_sources_and_dates() -> None:
    folder = files("tilecast.hardware").joinpath("nodes")
    tables = {path.name: tomllib.loads(path.read_text(encoding="utf-8")) for path in folder.iterdir()}
    rented = {name: table for name, table in tables.items() if "nodes" in table}
    for name, table in rented.items():
        stated = {key for row in table["nodes"] for key in row} - {"type", "gpu", "inter", "any_size"}
        assert stated <= set(table["sources"]), name
        if "price_per_hour" in stated:
            assert re.search(r"\d{4}-\d{2}-\d{2}", table["sources"]["price_per_hour"]), name
    assert len(list_node_types()) == sum(len(table["nodes"]) for table in rented.values()), "no type is in two files"


def test_a_node_that_is_listed_twice_counts_once() -> None:
    """With two concatenated lists, eight GPUs once counted as sixteen."""
    one = listed("a", {PRODUCT: "NVIDIA-H100-80GB-HBM3"}, {GPU: 8})
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": [one, one]})
    (pool,) = nodes.discover_pools(*nodes.parse_objects(text)).pools
    assert pool.max_gpus == 8
