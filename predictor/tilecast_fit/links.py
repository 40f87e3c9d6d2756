"""Fit the constants of a link (`hardware/links/*.toml`) to measured collectives.

    python -m tilecast_fit.links --data DIR [--leave-out 4]

The table is nccl-tests' times inside one node (ai-dynamo/aiconfigurator, `collectives/aiconfigurator/nccl.csv`). The
loss is the mean absolute logarithm of predicted over measured, every (operation, ranks, size) alike; one constant
at a time moves over a grid that narrows. `--leave-out` keeps the rows of that many ranks for the error it prints.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tilecast.collectives import COLLECTIVES, Group
from tilecast.hardware import Link, find_link
from tilecast.spec import Floats

LINKS: Mapping[str, str] = {
    "NVIDIA A100-SXM4-80GB": "nvlink3",
    "NVIDIA H100 80GB HBM3": "nvlink4",
    "NVIDIA H200": "nvlink4",
}
"""The link behind each GPU of the table. The L40S host had no path between sockets and is left out."""

BOUNDS: Mapping[str, tuple[float, float]] = {
    "launch_s": (1e-6, 2e-5),
    "latency_s": (1e-7, 5e-6),
    "efficiency": (0.5, 0.95),
    "low_latency_ratio": (0.1, 0.9),
    "ramp_s": (1e-6, 2e-4),
    "reduction_bytes_per_s": (1e11, 6e11),
}
LARGE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Rows:
    """Measured collectives of one operation: buffer bytes, ranks and seconds, each (n,)."""

    operation: str
    size_bytes: Floats
    ranks: Floats
    measured_s: Floats

    def errors(self, link: Link) -> Floats:
        """Logarithm of predicted over measured, (n,)."""
        group = Group(self.ranks, self.ranks, self.ranks)
        predicted = COLLECTIVES[self.operation](self.size_bytes, group, link, find_link("ethernet-100"))
        return np.asarray(np.log(predicted / self.measured_s))

    def where(self, mask: np.ndarray) -> Rows:
        """The chosen rows."""
        return Rows(self.operation, self.size_bytes[mask], self.ranks[mask], self.measured_s[mask])


def read(path: Path, link: str) -> list[Rows]:
    """The rows of a link's GPUs, by operation."""
    with path.open(newline="", encoding="utf-8") as handle:
        rows = [row for row in csv.DictReader(handle) if LINKS.get(row["gpu"]) == link]
    return [
        Rows(
            operation,
            np.array([float(row["bytes"]) for row in rows if row["op"] == operation]),
            np.array([float(row["n_gpus"]) for row in rows if row["op"] == operation]),
            np.array([float(row["latency_us"]) * 1e-6 for row in rows if row["op"] == operation]),
        )
        for operation in sorted({row["op"] for row in rows})
    ]


def loss(link: Link, tables: Sequence[Rows]) -> float:
    """Mean absolute logarithm over all rows."""
    return float(np.mean(np.concatenate([np.abs(rows.errors(link)) for rows in tables])))


def fit(link: Link, tables: Sequence[Rows], rounds: int = 6) -> Link:
    """The link with the constants that fit the rows best."""
    best, least = link, loss(link, tables)
    for turn in range(rounds):
        for name, (low, high) in BOUNDS.items():
            value = getattr(best, name)
            if not value:
                continue
            reach = (high / low) ** (0.5 ** (turn + 1))
            for candidate in np.clip(value * np.geomspace(1 / reach, reach, 15), low, high):
                tried = replace(best, **{name: float(f"{candidate:.3g}")})  # type: ignore[arg-type]
                if (reached := loss(tried, tables)) < least:
                    best, least = tried, reached
    return best


def main() -> None:
    """Fit every link of the table and print its constants and errors."""
    parser = argparse.ArgumentParser(prog="python -m tilecast_fit.links", description="Fit the constants of links.")
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds collectives/")
    parser.add_argument("--leave-out", type=int, default=0, metavar="RANKS", help="do not fit rows of so many ranks")
    options = parser.parse_args()
    for name in sorted(set(LINKS.values())):
        tables = read(options.data / "collectives" / "aiconfigurator" / "nccl.csv", name)
        kept = [rows.where(rows.ranks != options.leave_out) for rows in tables]
        found = fit(find_link(name), kept)
        print(name, *(f"{constant}={getattr(found, constant):.3g}" for constant in BOUNDS))
        for rows in tables:
            errors = np.abs(np.expm1(rows.errors(found)))
            held = rows.ranks == (options.leave_out or rows.ranks)
            large = rows.size_bytes >= LARGE_BYTES
            above, below = errors[held & large].mean(), errors[held & ~large].mean()
            print(f"  {rows.operation:15s} from 1 MiB {above:6.1%}  below {below:6.1%}")


if __name__ == "__main__":
    main()
