"""Fit the constants of NVLink (`hardware/protocols.toml` and `hardware/links/`) to measured collectives.

    python -m tilecast_fit links --data DIR [--leave-out 4]

The table is nccl-tests' times inside one node (ai-dynamo/aiconfigurator, `collectives/aiconfigurator/nccl.csv`).
`--leave-out` keeps the rows of that many GPUs for the errors it prints; nothing fitted to them is where it starts.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from tilecast.calibrate import CONSTANTS, Measurements, constant, fit, predict
from tilecast.hardware import Link, Protocol, find_link
from tilecast.spec import SpecError

LINKS: Mapping[str, str] = {
    "NVIDIA A100-SXM4-80GB": "nvlink3",
    "NVIDIA H100 80GB HBM3": "nvlink4",
    "NVIDIA H200": "nvlink4",
}
"""The link behind each GPU of the table. The L40S host had no path between sockets and is left out."""
LARGE_BYTES = 2**20
NETWORK = "ethernet-100"
"""A network for the formulas to have; no row of the table uses one."""


def start(name: str) -> Link:
    """The link with the constants of NCCL's own cost model (nccl, src/graph/tuning.cc), which no row of the table has
    touched; what that model does not have begins at a plain guess."""
    link = find_link(name)
    protocols = {
        "ll": Protocol(6.6e-6, 0.6e-6, 0.25),
        "ll128": Protocol(14e-6, 1.9e-6, 0.92),
        "simple": Protocol(8.4e-6, 3.4e-6, 1.0),
    }
    switch = link.bandwidth_bytes_per_s / 2 if link.reduction_bytes_per_s else 0.0
    return replace(
        link, efficiency=0.8, own_share=0.3, peer_s=0.5e-6, protocols=protocols, reduction_bytes_per_s=switch,
        reduction_start_s=25e-6,
    )  # fmt: skip


def read(path: Path, link: str) -> Measurements:
    """The rows of a link's GPUs.

    Raises:
        SpecError: the table cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8") as handle:
            rows = [row for row in csv.DictReader(handle) if LINKS.get(row["gpu"]) == link]
    except OSError as error:
        raise SpecError(str(path), "cannot be read", str(error.strerror or error)) from None
    ranks = np.array([float(row["n_gpus"]) for row in rows])
    return Measurements(
        np.array([row["op"] for row in rows]),
        np.array([float(row["bytes"]) for row in rows]),
        ranks, ranks, ranks,
        np.array([float(row["latency_us"]) * 1e-6 for row in rows]),
    )  # fmt: skip


def report(data: Path, leave_out: int) -> None:
    """Fit every link of the table and print its constants and errors, of the rows that were left out if any."""
    network = find_link(NETWORK)
    for name in sorted(set(LINKS.values())):
        measured = read(data / "collectives" / "aiconfigurator" / "nccl.csv", name)
        estimate = fit(start(name), measured.take(measured.ranks != leave_out), network)
        print(name, *(f"{key}={value:.3g}" for key in CONSTANTS if (value := constant(estimate, key))))
        judged = measured.take(measured.ranks == leave_out) if leave_out else measured
        errors = np.abs(predict(judged, estimate, network) / judged.seconds - 1)
        large = judged.size_bytes >= LARGE_BYTES
        for operation in [*np.unique(judged.collective), "all"]:
            rows = (judged.collective == operation) | (operation == "all")
            above, below = errors[rows & large].mean(), errors[rows & ~large].mean()
            print(f"  {operation:15s} {rows.sum():5d} rows  from 1 MiB {above:6.1%}  below {below:6.1%}")
