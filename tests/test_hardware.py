from collections import Counter
from pathlib import Path

import pytest

from tilecast.hardware import (
    find_gpu,
    find_link,
    instances,
    list_gpus,
    list_links,
    load_gpu,
    load_link,
    normalise_product,
    set_link_folder,
)
from tilecast.spec import SpecError

NAMES = [
    "h100-sxm", "h100-pcie", "h100-nvl", "h100-96-hbm2e", "h200", "gh200", "a100-40", "a100-80", "a100-40-pcie",
    "a100-80-pcie", "l4", "l40s", "t4", "v100-sxm", "v100-sxm-32", "v100-pcie", "v100-pcie-32", "p100", "p4", "a10",
    "a10g", "a40", "a30", "b200", "gb200", "a800-80", "b300", "gb300", "h100-96", "h20", "h200-nvl", "h800-sxm", "k80",
    "l40", "a800-80-pcie", "h800-pcie", "h20-3e", "rtx-3090", "rtx-4090", "rtx-6000-ada", "rtx-a5000", "rtx-a6000",
    "v100-sxm3", "v100-sxm3-450w", "rtx-5090", "rtx-pro-6000-server", "rtx-pro-6000-workstation", "h100-64",
    "p100-sxm", "rtx-3090-ti",
]  # fmt: skip

SPELLINGS = {
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA-A100-SXM4-40GB": "a100-40",
    "NVIDIA A100 80GB PCIe": "a100-80-pcie",
    "NVIDIA-A100-80GB-PCIe": "a100-80-pcie",
    "NVIDIA A100-PCIE-40GB": "a100-40-pcie",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA-H100-80GB-HBM3": "h100-sxm",
    "NVIDIA-H100-PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200",
    "NVIDIA GH200": "gh200",
    "H100-SXM-96GB-HBM2e-500W": "h100-96-hbm2e",
    "NVIDIA-L4": "l4",
    "NVIDIA L40S": "l40s",
    "Tesla-T4": "t4",
    "Tesla V100-SXM2 (DGX-1)": "v100-sxm",
    "Tesla V100-PCIE-16GB": "v100-pcie",
    "Tesla V100-PCIE-32GB": "v100-pcie-32",
    "Tesla P100-PCIE-16GB": "p100",
    "Tesla P4": "p4",
    "nvidia-tesla-a100": "a100-40",
    "nvidia-a100-80gb": "a100-80",
    "nvidia-h100-80gb": "h100-sxm",
    "nvidia-h100-mega-80gb": "h100-sxm",
    "nvidia-tesla-t4": "t4",
    "nvidia-l4": "l4",
    "A100_PCIE_80GB": "a100-80-pcie",
    "NVIDIA-A30": "a30",
    "A30-PCIe-24GB": "a30",
    "NVIDIA-A800-SXM4-80GB": "a800-80",
    "NVIDIA-A800-80GB-PCIe": "a800-80-pcie",
    "H800-SXM-80GB": "h800-sxm",
    "NVIDIA-H800": "h800-sxm",
    "NVIDIA-H800-PCIe": "h800-pcie",
    "NVIDIA-H20-3e": "h20-3e",
    "NVIDIA-H20": "h20",
    "NVIDIA-H200-NVL": "h200-nvl",
    "H200-NVL-141GB": "h200-nvl",
    "NVIDIA GH200 120GB": "gh200",
    "NVIDIA-GB200": "gb200",
    "GB200-NVL72": "gb200",
    "NVIDIA-GB300": "gb300",
    "GB300-NVL72": "gb300",
    "NVIDIA B300 SXM6 AC": "b300",
    "B300-SXM-270GB": "b300",
    "B300-SXM-288GB": "b300",
    "B200-SXM-192GB": "b200",
    "H100-SXM-96GB": "h100-96",
    "NVIDIA-L40": "l40",
    "NVIDIA-RTX-6000-Ada-Generation": "rtx-6000-ada",
    "NVIDIA-RTX-A6000": "rtx-a6000",
    "NVIDIA-RTX-A5000": "rtx-a5000",
    "NVIDIA-GeForce-RTX-3090": "rtx-3090",
    "NVIDIA-GeForce-RTX-4090": "rtx-4090",
    "NVIDIA-GeForce-RTX-5090": "rtx-5090",
    "NVIDIA-RTX-PRO-6000-Blackwell-Workstation-Edition": "rtx-pro-6000-workstation",
    "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition": "rtx-pro-6000-server",
    "nvidia-rtx-pro-6000": "rtx-pro-6000-server",
    "Tesla-V100-SXM3-32GB": "v100-sxm3",
    "Tesla-V100-SXM3-32GB-H": "v100-sxm3-450w",
    "V100-32GB": "v100-sxm3",
    "Tesla-K80": "k80",
}


LANES = {"kepler": 200}
"""Upper bound of FP32 lanes per SM where it is more than 128; Kepler has 192."""


def test_every_gpu_of_the_list_ships():
    assert sorted(list_gpus()) == sorted(NAMES)


def test_no_spelling_means_two_gpus():
    spellings = Counter(alias for gpu in list_gpus().values() for alias in set(gpu.aliases))
    assert {alias: count for alias, count in spellings.items() if count > 1} == {}


def test_a_file_found_by_its_name_says_what_the_list_says():
    assert {name: find_gpu(name) for name in list_gpus()} == list_gpus()
    assert {name: find_link(name) for name in list_links()} == list_links()
    assert [gpu.name for gpu in list_gpus().values()] == list(list_gpus())
    assert all(link.name == name for name, link in list_links().items())
    assert {name: instances.find_node_type(name.upper()) for name in instances.list_node_types()} == (
        instances.list_node_types()
    )


@pytest.mark.parametrize(("spelling", "name"), SPELLINGS.items())
def test_drivers_labels_and_tables_name_the_same_gpu(spelling, name):
    assert find_gpu(spelling).name == name


@pytest.mark.parametrize("gpu", list_gpus().values(), ids=lambda gpu: gpu.name)
def test_facts_are_physical(gpu):
    assert gpu.memory_bandwidth_bytes_per_s < gpu.l2_bandwidth_bytes_per_s
    lanes = gpu.peak("fp32") / (2 * gpu.sm_count * gpu.boost_clock_hz)
    assert 60 < lanes < LANES.get(gpu.architecture, 140), "an SM has 64 or 128 FP32 lanes"
    rates = [gpu.peak(precision) for precision in ("fp32", "tf32", "bf16", "fp8") if gpu.supports(precision)]
    assert rates == sorted(rates)
    assert all(0 < ratio <= 1 for ratio in gpu.sustained_ratio.values())


@pytest.mark.parametrize("gpu", list_gpus().values(), ids=lambda gpu: gpu.name)
def test_precisions_follow_the_architecture(gpu):
    assert gpu.supports("bf16") == gpu.supports("tf32") == (gpu.compute_capability >= 8.0)
    assert gpu.supports("fp8") == (gpu.compute_capability >= 8.9)


@pytest.mark.parametrize("gpu", list_gpus().values(), ids=lambda gpu: gpu.name)
def test_links_and_bridges_of_a_gpu_are_those_inside_a_node(gpu):
    inside = [find_link(name) for name in (gpu.intra_link, gpu.bridge) if name]
    assert not any(link.per_node for link in inside)
    assert all(link.beyond is not None for link in inside[1:]), "a bridge leaves the rest of the node to another link"


def test_geforce_states_the_rate_of_training_half_of_the_same_die_in_a_workstation():
    for geforce, workstation in (
        ("rtx-3090", "rtx-a6000"),
        ("rtx-4090", "rtx-6000-ada"),
        ("rtx-5090", "rtx-pro-6000-server"),
    ):
        per_cycle = [
            gpu.peak("bf16") / gpu.sm_count / gpu.boost_clock_hz for gpu in (find_gpu(geforce), find_gpu(workstation))
        ]
        assert per_cycle[0] == pytest.approx(per_cycle[1] / 2, rel=0.01)


@pytest.mark.parametrize(("cut", "whole"), [("a800-80", "a100-80"), ("h800-sxm", "h100-sxm")])
def test_export_parts_differ_from_the_whole_in_nvlink_alone(cut, whole):
    one, other = find_gpu(cut), find_gpu(whole)
    assert (one.peak_flops, one.memory_bandwidth_bytes_per_s) == (other.peak_flops, other.memory_bandwidth_bytes_per_s)
    rates = [find_link(gpu.intra_link).bandwidth_bytes_per_s for gpu in (one, other)]
    assert rates[0] == 200e9 < rates[1]


def test_missing_precision_names_what_there_is():
    with pytest.raises(SpecError, match="t4 has no bf16 units; use one of fp32, fp16"):
        find_gpu("t4").peak("bf16")


def test_unknown_gpu_offers_the_nearest():
    with pytest.raises(SpecError, match="did you mean h100-sxm"):
        find_gpu("h100-sxn")
    with pytest.raises(SpecError, match="did you mean rtx-4090"):
        find_gpu("4090")


@pytest.mark.parametrize("name", ["mi300x", "mi250", "gaudi3", "tpu-v5e", "trn1"])
def test_a_gpu_of_another_maker_is_not_taken_for_one_misspelled(name: str):
    with pytest.raises(SpecError, match=r"it is \w+'s, and only GPUs of NVIDIA are known"):
        find_gpu(name)


def test_a_job_brings_its_own_gpu(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text("""
name = "mine"
product = "Mine 1"
architecture = "ampere"
compute_capability = 8.6
sm_count = 10
memory_gib = 4
memory_bandwidth_gb_per_s = 100
l2_mib = 2
l2_bandwidth_gb_per_s = 400
boost_clock_mhz = 1000
tdp_w = 50
intra_link = "pcie4"
[peak_tflops]
fp32 = 2.56
[sources]
all = "made up for this test"
""")
    gpu = load_gpu(file)
    assert gpu.memory_bytes == 4 * 2**30
    assert gpu.peak_flops == {"fp32": 2.56e12}
    file.write_text(file.read_text().replace("sm_count = 10", "sm_count = 0"))
    with pytest.raises(SpecError, match=r"mine.toml: sm_count"):
        load_gpu(file)


def test_spelling_differences_vanish():
    assert normalise_product("NVIDIA A100-SXM4-80GB") == normalise_product("nvidia-a100_sxm4_80gb") == "a100-sxm4-80gb"


LINK = """
name = "{name}"
kind = "pcie"
protocols = "pcie"
bandwidth_gb_per_s = {rate}
efficiency = 0.5
{more}
[sources]
all = "made up for this test"
"""


def link_file(folder: Path, name: str, rate: str = "7", more: str = "") -> Path:
    path = folder / f"{name}.toml"
    path.write_text(LINK.format(name=name, rate=rate, more=more))
    return path


def test_a_link_of_the_user_is_beyond_the_domains_that_name_it(tmp_path: Path, own_links: None):
    link_file(tmp_path, "pcie4")
    link_file(tmp_path, "another", more='domain = 2\nbeyond = "zebra"')
    link_file(tmp_path, "zebra", rate="5")
    set_link_folder(str(tmp_path))
    assert find_link("nvlink3-pair").beyond.bandwidth_bytes_per_s == 7e9
    assert find_link("another").beyond.bandwidth_bytes_per_s == 5e9


@pytest.mark.parametrize("beyond", ["mine", "nvlink3-pair"])
def test_no_link_is_beyond_itself_or_has_two_beyond(beyond: str, tmp_path: Path, own_links: None):
    path = link_file(tmp_path, "mine", more=f'domain = 2\nbeyond = "{beyond}"')
    with pytest.raises(SpecError, match="mine: beyond"):
        load_link(path)
    set_link_folder(str(tmp_path))
    with pytest.raises(SpecError, match=f"mine: beyond: '{beyond}' is the link itself or has another"):
        find_link("nvlink3")


@pytest.mark.parametrize(
    ("rate", "more", "field"),
    [
        ("inf", "", "bandwidth_gb_per_s"),
        ("7", "reduction_gb_per_s = inf", "reduction_gb_per_s"),
        ("7", "wired = [[inf, 0.5]]", "wired"),
        ("7", "wired = [[2, 0.5], [2, 0.7]]", "wired"),
        ("7", "tiers = [{ nodes = 2, oversubscription = inf }]", "tiers"),
    ],
)
def test_links_are_finite_and_state_each_count_once(rate: str, more: str, field: str, tmp_path: Path):
    with pytest.raises(SpecError, match=rf"mine\.toml: {field}"):
        load_link(link_file(tmp_path, "mine", rate, more))
