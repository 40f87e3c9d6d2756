"""Fit the constants of networks between nodes (`hardware/protocols.toml`) to measured collectives.

    python -m tilecast_lab networks --data DIR

The tables have times of nccl-tests between nodes (`collectives/nccl_multinode.csv`). Networks of one table of
protocols, such as `rdma`, are fitted together; every run of a source on one number of ranks has the same weight. Each
fit starts near NCCL's own latencies, whatever ships. The errors printed beside the fitted ones are those of rows that
were not fitted: every second size, then each link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tilecast.collectives.link_calibration import Measurements, predict_collectives
from tilecast.hardware import Link, LinkProtocol, find_link_file
from tilecast.spec import Floats
from tilecast_lab.validate import csvfile
from tilecast_lab.validate.collectives import find_links, read_measurements

TABLES = "**/collectives/nccl_multinode.csv"
"""Pattern of the tables below the data folder."""
FITTED = (
    ("ll", "start_s"), ("ll", "hop_s"), ("ll", "share"), ("ll128", "start_s"), ("ll128", "hop_s"), ("ll128", "share"),
    ("simple", "start_s"), ("simple", "hop_s"),
)  # fmt: skip
"""Constants that are fitted, by protocol and field."""
START = {
    "ll": LinkProtocol(6.6e-6, 10e-6, 0.25),
    "ll128": LinkProtocol(14e-6, 14e-6, 0.6),
    "simple": LinkProtocol(8.4e-6, 24e-6, 1.0),
}
"""Constants at which every fit starts: those of NCCL's cost model (nccl, src/graph/tuning.cc), else a plain guess."""
MOST_NODES = 32
"""Most nodes of a row that is fitted: the law has no contention, which larger groups measure too."""
REGULARIZATION = 0.02
"""Loss of moving every constant by a factor of e, beside the mean absolute logarithm of forecast over measured."""
ROUNDS = 30
FIRST_STEP = 0.4
"""First step of each constant, as a logarithm; a step that does not help is shortened by `SHORTER`."""
SHORTER = 0.6

Protocols = Mapping[str, LinkProtocol]


@dataclass(frozen=True, slots=True)
class MeasuredNetwork:
    """Rows of one source on one network, with the link inside its nodes."""

    intra: Link
    network: Link
    measured: Measurements

    def ratios(self, protocols: Protocols) -> Floats:
        """Return forecast over measured time of every row if the network has the protocols, (R,)."""
        network = replace(self.network, protocols=protocols)
        return predict_collectives(self.measured, self.intra, network) / self.measured.seconds

    def take(self, rows: slice) -> MeasuredNetwork:
        """Return the network with some of its rows, by increasing size."""
        return replace(self, measured=self.measured.take(np.argsort(self.measured.size_bytes, kind="stable")[rows]))


def read_networks(data: Path) -> Mapping[str, list[MeasuredNetwork]]:
    """Return the measured networks below a folder, by the name of their table of protocols.

    Raises:
        SpecError: there is no table, or one cannot be read.
    """
    networks: dict[str, list[MeasuredNetwork]] = defaultdict(list)
    for path in csvfile.find_tables(data, TABLES):
        header, cells = csvfile.read_csv(path)
        columns = {name: [line[i] for line in cells] for i, name in enumerate(header)}
        measured, joined = read_measurements(path, columns)
        usable = (measured.collective != "") & (measured.size_bytes >= 1) & (measured.seconds > 0)
        usable &= (measured.ranks > measured.local) & (measured.ranks <= MOST_NODES * measured.local) & (joined == 1)
        for members, intra, network in find_links(path, columns, measured, joined):
            if intra is None or network is None:
                continue
            table = find_link_file(network.name).protocols
            runs = defaultdict(list)
            for row in members:
                if not usable[row]:
                    continue
                runs[columns["source"][row], columns["config"][row], measured.ranks[row]].append(row)
            if isinstance(table, str):
                networks[table] += [
                    MeasuredNetwork(intra, network, measured.take(np.array(rows))) for rows in runs.values()
                ]
    return networks


def fit_protocols(networks: Sequence[MeasuredNetwork]) -> Protocols:
    """Return the protocols that fit measured networks of one table of protocols best, by coordinate descent."""
    start = {name: START[name] for name in networks[0].network.protocols if name in START}
    names = [(name, field) for name, field in FITTED if name in start]
    best = np.zeros(len(names))
    least = _loss(networks, start)
    steps = np.full(len(names), FIRST_STEP)
    for _ in range(ROUNDS):
        for index in range(len(names)):
            for sign in (1, -1):
                tried = best.copy()
                tried[index] += sign * steps[index]
                loss = _loss(networks, _move(start, names, tried)) + REGULARIZATION * float(np.mean(tried**2))
                if loss < least:
                    best, least = tried, loss
                    break
            else:
                steps[index] *= SHORTER
    return _move(start, names, best)


def _move(start: Protocols, names: Sequence[tuple[str, str]], logarithms: Floats) -> Protocols:
    """Return protocols whose constants are those of `start` times e to the logarithms."""
    moved = dict(start)
    for (name, field), factor in zip(names, np.exp(logarithms), strict=True):
        moved[name] = replace(moved[name], **{field: getattr(start[name], field) * float(factor)})
    return moved


def _loss(networks: Sequence[MeasuredNetwork], protocols: Protocols) -> float:
    return float(np.mean([np.abs(np.log(network.ratios(protocols))).mean() for network in networks]))


def mean_error(networks: Sequence[MeasuredNetwork], protocols: Protocols) -> float:
    """Return the mean of |forecast - measured| / measured over the rows of networks that have the protocols."""
    return float(np.concatenate([np.abs(network.ratios(protocols) - 1) for network in networks]).mean())


def report_networks(data: Path) -> None:
    """Fit every table of protocols with measured networks, and print constants and errors."""
    for table, networks in sorted(read_networks(data).items()):
        fitted = fit_protocols(networks)
        halves = fit_protocols([network.take(slice(0, None, 2)) for network in networks])
        others = [network.take(slice(1, None, 2)) for network in networks]
        print(f"{table}: {sum(len(network.measured) for network in networks)} rows")
        for name, one in fitted.items():
            print(f"  {name}: start {one.start_s * 1e6:.3g} us, hop {one.hop_s * 1e6:.3g} us, share {one.share:.3g}")
        errors = {
            "as it ships": mean_error(networks, networks[0].network.protocols),
            "fitted": mean_error(networks, fitted),
            "every second size left out": mean_error(others, halves),
        }
        links = {network.network.name for network in networks}
        for link in sorted(links if len(links) > 1 else ()):
            rest = fit_protocols([network for network in networks if network.network.name != link])
            left = [network for network in networks if network.network.name == link]
            errors[f"{link} left out"] = mean_error(left, rest)
        for words, error in errors.items():
            print(f"  {words:40s} {error:6.1%}")
