"""Tables of measured collectives: their meaning, their forecasts, and the errors for wrong tables."""

from __future__ import annotations

import csv
import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from tilecast.cli import main
from tilecast.hardware import find_gpu
from tilecast_lab.validate import collectives
from tilecast_lab.validate.collectives import REASONS, read_collectives
from tilecast_lab.validate.networks import intra_link, network_link

HEADER = "source,gpu,interconnect,op,dtype,n_gpus,n_nodes,bytes,latency_us"
A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"
NVSWITCH = f"x,{H100},NVSwitch (NVLink4),all_reduce,fp16,8,1"


def table(folder: Path, *rows: str, header: str = HEADER, name: str = "t.csv") -> Path:
    path = folder / name
    text = "\n".join([header, *rows]) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize(
    ("gpu", "words", "shape", "link"),
    [
        (A100, "NVSwitch (NVLink3)", "8,1", "nvlink3"),
        (A100, "NVLink3, 4-GPU board without NVSwitch (inferred)", "4,1", "nvlink3-board"),
        ("NVIDIA H100 (pairwise NVLink)", "NVLink bridge pairs + PCIe", "4,1", "nvlink4-pair"),
        ("NVIDIA A40", "NVLink bridge pairs + PCIe", "2,1", "pcie4"),
        ("Tesla V100 (variant not stated)", "NVLink2 (topology not stated)", "8,1", "nvlink2"),
        ("Tesla V100-PCIE-16GB", "PCIe Gen3", "4,1", "pcie3"),
        ("NVIDIA L40S", "PCIe Gen4", "2,1", "pcie4"),
        (H100, "", "8,1", "nvlink4"),
        (H100, "NVSwitch; InfiniBand NDR 8x400 Gb/s", "16,2", "infiniband-ndr-8x400"),
        (A100, "NVSwitch + EFA 4x100 Gb/s", "16,2", "efa-400"),
        ("Tesla T4", "PCIe; Kubernetes pods, Ethernet 50 Gbps", "4,4", "pod-tcp"),
    ],
)
def test_words_of_a_source_mean_a_link(gpu: str, words: str, shape: str, link: str, tmp_path: Path) -> None:
    samples = read_collectives(table(tmp_path, f'x,{gpu},"{words}",all_reduce,fp16,{shape},1048576,100'))
    assert samples.link == [link]
    assert samples.reason == [""]
    assert 0 < samples.lower[0] < samples.seconds[0] < samples.upper[0]
    assert samples.bound[0] < samples.seconds[0]


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
@pytest.mark.parametrize("op", ["all_reduce", "allgather", "reduce_scatter", "alltoall", "p2p", "sendrecv"])
def test_every_spelling_of_a_collective_is_priced(op: str, name: str, tmp_path: Path) -> None:
    row = NVSWITCH.replace("all_reduce", op)
    assert read_collectives(table(tmp_path, f"{row},4096,10", name=name)).seconds[0] > 0


def test_rows_come_back_in_order_with_four_columns_more(tmp_path: Path) -> None:
    rows = [
        f"{NVSWITCH},{2**20},25,NCCL",
        f"{NVSWITCH},{2**20},25,custom:vLLM",
        f"x,{A100},NVSwitch (NVLink3); inter-node network not stated,all_gather,fp16,16,2,4096,70,NCCL",
        f"{NVSWITCH},{2**10},,NCCL",
    ]
    path = table(tmp_path, *rows, header=HEADER + ",impl")
    text = collectives.run([path], tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        written = list(csv.reader(file))
    assert written[0] == [*(HEADER + ",impl").split(","), "predicted_us", "lower_us", "upper_us", "reason"]
    assert [line[:10] for line in written[1:]] == [row.split(",") for row in rows]
    assert [line[-1] for line in written[1:]] == ["", "custom-kernel", "network-not-stated", ""]
    for line in (written[1], written[4]):
        assert float(line[-3]) < float(line[-4]) < float(line[-2])
    assert all(cell == "" for line in (written[2], written[3]) for cell in line[-4:-1])
    assert "all_reduce     nvlink4                  1x8       1" in text
    assert "not predicted: custom-kernel 1, network-not-stated 1" in text


def test_more_groups_per_node_have_the_same_shape(tmp_path: Path) -> None:
    """XLA's tables time several groups of a node at once; vidur's state how many GPUs of a node take part."""
    plain, two = (
        NVSWITCH.replace(",8,1", ",4,1"),
        NVSWITCH.replace(",8,1", ",16,2").replace("(NVLink4)", "+ EFA 32x100 Gb/s"),
    )
    same = read_collectives(table(tmp_path, f"{plain},4096,10,2", header=HEADER + ",concurrent_groups")).seconds
    assert same == read_collectives(table(tmp_path, f"{plain},4096,10")).seconds
    samples = read_collectives(table(tmp_path, f"{two},4096,10,8", header=HEADER + ",gpus_per_node"))
    assert samples.measured.local.tolist() == [8.0]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (H100, "GeForce 256", "unknown-gpu"),
        ("all_reduce", "broadcast", "unpriced-collective"),
        (",8,1", ",1,1", "single-rank"),
    ],
)
def test_a_row_that_cannot_be_priced_loses_no_other(old: str, new: str, reason: str, tmp_path: Path) -> None:
    samples = read_collectives(table(tmp_path, NVSWITCH.replace(old, new) + ",8,1", f"{NVSWITCH},8,1"))
    assert samples.reason == [reason, ""]
    assert np.isnan(samples.seconds).tolist() == [True, False]


def test_an_empty_buffer_is_not_scored(tmp_path: Path) -> None:
    samples = read_collectives(table(tmp_path, f"{NVSWITCH},0,9", f"{NVSWITCH},1,9"))
    assert samples.reason == ["empty-buffer", ""]
    assert np.isnan(samples.seconds).tolist() == [True, False]


@pytest.mark.parametrize(
    ("gpu", "words", "gigabytes", "nics"),
    [
        (H100, "NVSwitch; InfiniBand", 400, 8),
        (A100, "NVSwitch; InfiniBand HDR 200 Gb/s", 200, 8),
        (A100, "NVSwitch; InfiniBand 4x 200 Gb/s", 100, 4),
        (H100, "NVSwitch; EFA", 400, 32),
        (A100, "NVSwitch; EFA 400 Gb/s", 50, 4),
        (H100, "NVSwitch; RDMA 400 Gb/s per GPU", 400, 8),
        (H100, "NVSwitch; Storage: 2x ConnectX-7 IB NDR 400Gb/s, Compute: 8x ConnectX-7 IB NDR 400Gb/s", 400, 8),
        (H100, "NVSwitch; 8x ConnectX-7 IB NDR 400Gb/s + 200Gb/s Ethernet NIC", 400, 8),
        (H100, "NVSwitch; ROCE2, data bandwidth for GPU-PCIe: 504 GB/s", 400, 8),
        (A100, "NVSwitch; 1x Ethernet 40Gb/Sec, 8x ConnectX-6 IB HDR 200Gb/Sec", 200, 8),
        (A100, "NVSwitch; Management: 1x Ethernet 40Gb/Sec, Compute: 4x ConnectX-6 IB HDR 200Gb/Sec", 100, 4),
        (A100, "NVSwitch; Storage: 2x ConnectX-6 IB HDR 200Gb/sec, Management: 1x Ethernet 100G", 200, 8),
        ("L40S", "PCIe; BF3 200Gbps for NS and 2xBF3 400Gbps for EW", 100, 2),
        ("V100-SXM2-32GB", "NVLink; DGX cluster InfiniBand", 50, 4),
        ("V100-SXM2-16GB", "NVLink; InfiniBand 100 Gb/s", 12.5, 8),
        ("GH200", "NVLink; Slingshot-11", 100, 4),
        ("GB300", "NVLink5 NVL72; InfiniBand", 400, 4),
    ],
)
def test_words_and_figures_of_a_network_give_its_rate(gpu: str, words: str, gigabytes: float, nics: int) -> None:
    link = network_link(words.split(";")[1], find_gpu(gpu), 8)
    assert (link.bandwidth_bytes_per_s, link.nics) == (gigabytes * 1e9, nics)


@pytest.mark.parametrize(
    ("gpu", "words", "link"),
    [
        ("A30", "PCIe Gen4 (NVLink bridge on some hosts)", "pcie4"),
        ("A30", "NVLink bridge pairs + PCIe", "nvlink3-pair-100"),
        ("RTX-A6000", "NVLink bridge pairs + PCIe", "nvlink3-pair-56"),
        ("L40S", "NVLink bridge pairs + PCIe Gen4", "pcie4"),
        ("A800-SXM4-80GB", "NVLink 400GB/s (A800)", "nvlink3-400"),
        ("H200-NVL-141GB", "NVLink bridge / PCIe Gen5", "nvlink4-quad"),
        ("GH200-96GB", "NVLink4 (GH200 quad node)", "nvlink4-board"),
        ("GB200-NVL72", "NVLink5 NVL72", "nvlink5-nvl72"),
        ("V100-SXM2-32GB", "NVLink hybrid cube mesh (DGX-1)", "nvlink2"),
        ("V100-SXM2-32GB", "NVSwitch (DGX-2)", "nvlink2-switch"),
        ("V100-SXM3-32GB", "NVLink", "nvlink2-switch"),
    ],
)
def test_words_name_the_link_inside_a_node(gpu: str, words: str, link: str) -> None:
    assert intra_link(words, find_gpu(gpu)).name == link


def test_links_may_be_named(tmp_path: Path) -> None:
    header = "op,bytes,n_gpus,n_nodes,link,network,latency_us"
    samples = read_collectives(table(tmp_path, "all_reduce,1e6,16,2,nvlink4,pod-tcp,1e4", header=header))
    assert samples.link == ["pod-tcp"]


BAD = {
    "unknown-collective": (
        [NVSWITCH.replace("all_reduce", "gossip") + ",8,1"],
        "row 1: op: unknown collective 'gossip'",
    ),
    "unknown-link": (
        [f"x,{H100},carrier pigeon,all_reduce,fp16,8,1,8,1"],
        "interconnect: unknown link 'carrier pigeon'",
    ),
    "not-a-number": ([f"{NVSWITCH},8,1", f"{NVSWITCH},nan,1"], "row 2: bytes: 'nan'"),
    "words": ([f"{NVSWITCH},many,1"], "bytes: 'many'"),
    "negative": ([f"{NVSWITCH},-4,1"], "bytes: '-4'"),
    "part-of-a-byte": ([f"{NVSWITCH},0.5,1"], "row 1: bytes: 0.5 is less than a byte"),
    "infinite": ([f"{NVSWITCH},8,inf"], "latency_us: 'inf'"),
    "no-size": ([f"{NVSWITCH},,1"], "bytes: ''"),
    "uneven": ([NVSWITCH.replace(",8,1", ",8,3") + ",8,1"], "n_nodes: 8 GPUs do not fill 3 nodes"),
    "no-rows": ([], "holds no row"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.slow
def test_a_bad_row_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, expected = BAD[name]
    assert main(["validate", "collectives", str(table(tmp_path, *rows))]) == 2
    _one_line(capsys, expected)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "lacks the columns op, bytes, n_gpus"),
        (b"a,b\n1,2\n", "lacks the columns"),
        (b"\x1f\x8b\x08\x00broken", "cannot be read as CSV"),
        (b"op,bytes,n_gpus\nall_reduce,8,8\n", "gpu: is empty"),
        (b"op,bytes,n_gpus,link\nall_reduce,8,8,string\n", "link: unknown link 'string'"),
        (b"op,bytes,n_gpus,n_nodes,link,network\nall_reduce,8,8,2,nvlink4,tin\n", "network: unknown link 'tin'"),
    ],
)
def test_a_bad_file_is_one_line(
    content: bytes, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    assert main(["validate", "collectives", str(path)]) == 2
    _one_line(capsys, expected)


def test_a_rows_file_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path, f"{NVSWITCH},8,1")
    assert main(["validate", "collectives", str(path), "--rows", str(tmp_path / "no" / "out.csv")]) == 2
    _one_line(capsys, "cannot be written")


def _one_line(capsys: pytest.CaptureFixture[str], expected: str) -> None:
    error = capsys.readouterr().err
    assert error.startswith("tilecast: ") and error.count("\n") == 1, error
    assert expected in error


def data() -> list[Path]:
    folder = os.environ.get("TILECAST_DATA")
    if not folder:
        pytest.skip("TILECAST_DATA names no folder with measured tables")
    return sorted((Path(folder) / "collectives").glob("*/*.csv*"))


@pytest.mark.data
def test_every_published_table_is_read_and_beats_the_line_rate() -> None:
    tables = [read_collectives(path) for path in data()]
    assert len(tables) >= 5
    for one in tables:
        assert {*one.reason} <= {"", *REASONS}
        scored = np.isfinite(one.seconds) & np.isfinite(one.measured.seconds)
        if scored.any():
            taken = one.measured.seconds[scored]
            ours, plain = (abs(column[scored] / taken - 1).mean() for column in (one.seconds, one.bound))
            assert ours < 0.6 * plain


@pytest.mark.data
@pytest.mark.parametrize(("link", "ceiling"), [("nvlink3", (0.09, 0.11)), ("nvlink4", (0.09, 0.13))])
def test_links_keep_their_accuracy(link: str, ceiling: tuple[float, float]) -> None:
    """Mean errors when the limits were set: nvlink3 6.6 % from 1 MiB and 7.7 % below, nvlink4 6.5 and 10.8 %."""
    samples = read_collectives(next(path for path in data() if path.name == "nccl.csv"))
    error = abs(samples.seconds / samples.measured.seconds - 1)
    rows, large = np.array(samples.link) == link, samples.measured.size_bytes >= 2**20
    assert error[rows & large].mean() < ceiling[0]
    assert error[rows & ~large].mean() < ceiling[1]
