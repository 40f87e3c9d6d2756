"""Fit the constants of NVLink (`hardware/protocols.toml` and `hardware/links/`) to measured collectives.

    python -m tilecast_lab links --data DIR [--leave-out 4]

The table has times of nccl-tests inside one node (ai-dynamo/aiconfigurator, `collectives/aiconfigurator/nccl.csv`).
With `--leave-out` the rows of that many GPUs are not fitted and the printed errors are theirs. The start of the fit
does not depend on them either.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from tilecast.collectives.link_calibration import CONSTANTS, Measurements, fit_link, predict_collectives, read_constant
from tilecast.hardware import Link, LinkProtocol, find_link
from tilecast.spec import SpecError

LINKS: Mapping[str, str] = {
    "NVIDIA A100-SXM4-80GB": "nvlink3",
    "NVIDIA H100 80GB HBM3": "nvlink4",
    "NVIDIA H200": "nvlink4",
}
"""Link of each GPU in the table; the L40S is left out, because its host had no path between sockets."""
LARGE_BYTES = 2**20
"""Least size of a large buffer; errors of large and small ones are printed apart."""
NETWORK = "ethernet-100"
"""Network passed to the formulas, which need one; no row of the table uses it."""


def initial_link(name: str) -> Link:
    """Return the link with the constants from which its fit starts, none of them fitted to the table.

    They are those of NCCL's own cost model (nccl, src/graph/tuning.cc); constants that it does not have start at a
    plain guess.
    """
    link = find_link(name)
    protocols = {
        "ll": LinkProtocol(6.6e-6, 0.6e-6, 0.25),
        "ll128": LinkProtocol(14e-6, 1.9e-6, 0.92),
        "simple": LinkProtocol(8.4e-6, 3.4e-6, 1.0),
    }
    switch = link.bandwidth_bytes_per_s / 2 if link.reduction_bytes_per_s else 0.0
    return replace(
        link, efficiency=0.8, own_share=0.3, peer_s=0.5e-6, protocols=protocols, reduction_bytes_per_s=switch,
        reduction_start_s=25e-6,
    )  # fmt: skip


def read_rows(path: Path, link: str) -> Measurements:
    """Read the rows of the GPUs that have a link.

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


def report_fit(data: Path, leave_out: int) -> None:
    """Fit every link of the table and print its constants and errors, on the rows left out if there are any."""
    network = find_link(NETWORK)
    for name in sorted(set(LINKS.values())):
        measured = read_rows(data / "collectives" / "aiconfigurator" / "nccl.csv", name)
        estimate = fit_link(initial_link(name), measured.take(measured.ranks != leave_out), network)
        print(name, *(f"{key}={value:.3g}" for key in CONSTANTS if (value := read_constant(estimate, key))))
        judged = measured.take(measured.ranks == leave_out) if leave_out else measured
        errors = np.abs(predict_collectives(judged, estimate, network) / judged.seconds - 1)
        large = judged.size_bytes >= LARGE_BYTES
        for operation in [*np.unique(judged.collective), "all"]:
            rows = (judged.collective == operation) | (operation == "all")
            above, below = errors[rows & large].mean(), errors[rows & ~large].mean()
            print(f"  {operation:15s} {rows.sum():5d} rows  from 1 MiB {above:6.1%}  below {below:6.1%}")
