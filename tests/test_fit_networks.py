"""`python -m tilecast_lab networks`: constants of networks are found again in times that they made."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tilecast.hardware import LinkProtocol
from tilecast.spec import SpecError
from tilecast_lab.fit.networks import MeasuredNetwork, fit_protocols, mean_error, read_networks, report_networks

COLUMNS = ("source", "gpu", "interconnect", "op", "dtype", "n_gpus", "n_nodes", "bytes", "latency_us", "config")
TRUE = {
    "ll": LinkProtocol(12e-6, 8e-6, 0.2),
    "ll128": LinkProtocol(20e-6, 15e-6, 0.6),
    "simple": LinkProtocol(15e-6, 40e-6, 1.0),
}


def write_table(folder: Path, words: str, latency_us: np.ndarray) -> None:
    (folder / "collectives").mkdir()
    with (folder / "collectives" / "nccl_multinode.csv").open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(COLUMNS)
        for power, time in enumerate(latency_us):
            gpu = "NVIDIA H100 80GB HBM3"
            writer.writerow(("someone", gpu, words, "all_reduce", "fp32", 32, 4, 2 ** (power + 4), time, "x"))


def measured_network(folder: Path) -> MeasuredNetwork:
    write_table(folder, "NVSwitch (NVLink4); InfiniBand NDR 8 x 400 Gb/s", np.full(28, 1.0))
    (network,) = read_networks(folder)["rdma"]
    true_s = network.ratios(TRUE)  # the table's times are one microsecond
    return replace(network, measured=replace(network.measured, seconds=true_s * 1e-6))


def test_constants_that_made_the_times_are_found_again(tmp_path: Path) -> None:
    network = measured_network(tmp_path)
    assert mean_error([network], network.network.protocols) > 0.1
    assert mean_error([network], fit_protocols([network])) < 0.05


def test_every_second_size_is_forecast_by_the_others(tmp_path: Path) -> None:
    network = measured_network(tmp_path)
    fitted = fit_protocols([network.take(slice(0, None, 2))])
    assert mean_error([network.take(slice(1, None, 2))], fitted) < 0.05


def test_the_report_names_tables_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(tmp_path, "NVSwitch (NVLink4); GPUDirect-TCPXO 8 x 200 Gb/s", np.geomspace(120, 1e6, 28))
    report_networks(tmp_path)
    printed = capsys.readouterr().out
    assert printed.startswith("tcpxo: 28 rows")
    assert "every second size left out" in printed


def test_a_folder_without_tables_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="has no"):
        read_networks(tmp_path)
