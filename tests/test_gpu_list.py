"""The list of `--gpus`: GPUs and instance types, counts and links."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast.hardware import find_gpu, instances, list_gpus
from tilecast.inputs.gpu_list import ASSUMED, STATED, parse_gpu_list
from tilecast.spec import SpecError


@pytest.mark.parametrize(
    ("text", "shape", "inter"),
    [
        ("h100-sxm:16", (2, 8), "infiniband-ndr-8x400"),
        ("8xh100", (1, 8), "infiniband-ndr-8x400"),
        ("16 x h100-sxm", (2, 8), "infiniband-ndr-8x400"),
        ("h100-sxm:3x4", (3, 4), "infiniband-ndr-8x400"),
        ("p5.48xlarge:2", (2, 8), "efa-3200"),
        ("P5.48xlarge:2", (2, 8), "efa-3200"),
        ("Standard_ND96isr_H100_v5:2", (2, 8), "infiniband-ndr-8x400"),
        ("a3-megagpu-8g:4", (4, 8), "gpudirect-tcpxo-8x200"),
        ("h100-sxm:16@infiniband-ndr-8x400", (2, 8), "infiniband-ndr-8x400"),
        ("h100-sxm:16@ethernet-80", (2, 8), "ethernet-80"),
        ("h100-96-hbm2e:128", (16, 8), "infiniband-ndr-8x400"),
        ("gh200:8", (2, 4), "infiniband-hdr-4x200"),
        ("h100-pcie:16", (2, 8), "ethernet-200"),
    ],
)
def test_every_form_is_read(text: str, shape: tuple[int, int], inter: str) -> None:
    (pool,) = parse_gpu_list(text)
    assert (pool.max_nodes, pool.gpus_per_node) == shape
    assert pool.inter.name == inter


def test_the_network_of_every_instance_type_is_the_one_of_its_name() -> None:
    """The network that `--gpus l4:16` assumes was once faster than the same one stated."""
    links = [kind.inter for kind in instances.list_node_types().values() if kind.inter is not None]
    assert "ethernet-100" in {link.name for link in links}
    for link in links:
        assert instances.find_network(link.name) == link
    assumed, stated = (parse_gpu_list(text)[0] for text in ("l4:16", "l4:16@ethernet-100"))
    assert assumed.inter == stated.inter


def test_a_link_inside_nodes_is_not_taken_as_one_between_them() -> None:
    (pool,) = parse_gpu_list("a100-80:16@nvlink3-400@ethernet-100")
    assert (pool.intra.name, pool.inter.name) == ("nvlink3-400", "ethernet-100")
    assert pool.layers == {"gpusPerNode": ASSUMED, "interNode": STATED, "intraNode": STATED}


def test_types_with_one_gpu_are_told_apart() -> None:
    names = [pool.name for pool in parse_gpu_list("p5.48xlarge:1,Standard_ND96isr_H100_v5:1,h100-sxm:8,l4:8")]
    assert names == ["p5.48xlarge", "standard-nd96isr-h100-v5", "h100-sxm", "l4"]


def test_an_instance_type_is_the_pool_of_its_gpu() -> None:
    (by_type,), (by_gpu,) = parse_gpu_list("gd-8xh100ib-i128:2"), parse_gpu_list("h100-sxm:16")
    assert by_type == replace(by_gpu, layers=by_type.layers)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h100-sxm", "NAME:COUNT"),
        ("h100-sxm:", "NAME:COUNT"),
        (":8", "NAME:COUNT"),
        ("h100-sxm:0", "no GPU"),
        ("h100-sxm:0x8", "no GPU"),
        ("h100-sxm:9999999", "more than"),
        ("h100-sxm:8x", "NAME:COUNT"),
        ("h100-sxm:-8", "NAME:COUNT"),
        ("h100-sxm:٨", "NAME:COUNT"),
        ("p5.48xlarge:2x4", "has 8 GPUs"),
        ("h100-sxm:8@", "link"),
        ("h100-sxm:8@nothing", "unknown link"),
        ("h100-sxm:8,h100-sxm:16", "twice"),
        ("p5.48xlarge:1,p5.48xlarge:2", "twice"),
        ("", "NAME:COUNT"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_remedy(text: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_gpu_list(text)
    assert words in str(refused.value)


@given(st.sampled_from(sorted(list_gpus())), st.integers(1, 64), st.integers(1, 16))
def test_stated_nodes_have_the_stated_size(name: str, nodes: int, per_node: int) -> None:
    (pool,) = parse_gpu_list(f"{name}:{nodes}x{per_node}")
    assert (pool.gpu, pool.max_nodes, pool.gpus_per_node) == (find_gpu(name), nodes, per_node)


@given(st.sampled_from(sorted(instances.list_node_types())), st.integers(1, 64))
def test_every_instance_type_makes_a_pool(name: str, nodes: int) -> None:
    (pool,) = parse_gpu_list(f"{name}:{nodes}")
    kind = instances.list_node_types()[name]
    assert (pool.gpu.name, pool.max_nodes, pool.gpus_per_node) == (kind.gpu, nodes, kind.gpus)
    assert pool.price_per_gpu_hour == kind.price_per_gpu_hour


@pytest.mark.parametrize(("board", "sibling"), [("h100-500w", "h100-sxm"), ("h100-sxm-64gb", "h100-64")])
def test_a_board_without_a_size_is_one_of_the_usual_gpu(board: str, sibling: str) -> None:
    (pool,) = parse_gpu_list(f"{board}:8")
    usual = find_gpu(sibling)
    assert pool.gpu.memory_bytes == usual.memory_bytes
    assert pool.gpu.memory_bandwidth_bytes_per_s == usual.memory_bandwidth_bytes_per_s


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mi300x:8", "--gpus: unknown GPU 'mi300x'; it is AMD's, and only GPUs of NVIDIA are known"),
        ("p5.48xlrge:2", "--gpus: unknown GPU 'p5.48xlrge'; did you mean p5.48xlarge?"),
        ("h100-sxn:8", "--gpus: unknown GPU 'h100-sxn'; did you mean h100-sxm?"),
        ("h100-sxm:16@infiniband-ndr", "--gpus: unknown link 'infiniband-ndr'; did you mean infiniband-ndr-"),
    ],
)
def test_a_name_that_is_not_known_is_answered_with_one(text: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_gpu_list(text)
    assert str(refused.value).startswith(words)
    assert len(str(refused.value)) < 160


def test_azure_types_need_no_prefix() -> None:
    assert parse_gpu_list("ND96isr_H100_v5:2") == parse_gpu_list("Standard_ND96isr_H100_v5:2")


def test_a_link_of_all_pools_yields_to_that_of_an_entry() -> None:
    first, second, third = parse_gpu_list("h100-sxm:16,p4d.24xlarge:2,l4:8@ethernet-50", ["ethernet-80", "nvlink4"])
    assert [pool.inter.name for pool in (first, second, third)] == ["ethernet-80", "ethernet-80", "ethernet-50"]
    assert {pool.intra.name for pool in (first, second, third)} == {"nvlink4"}
    with pytest.raises(SpecError, match=r"^--link: unknown link"):
        parse_gpu_list("h100-sxm:16", ["no-such"])


def test_the_last_node_may_have_fewer_gpus() -> None:
    (pool,) = parse_gpu_list("h100-sxm:100")
    assert (pool.max_nodes, pool.gpus_per_node, pool.spare_gpus, pool.max_gpus) == (12, 8, 4, 100)
    (whole,) = parse_gpu_list("h100-sxm:96")
    assert (whole.spare_gpus, whole.max_gpus) == (0, 96)
    assert not replace(pool, max_nodes=1).is_partial_node
