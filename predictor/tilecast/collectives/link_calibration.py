"""Fit the constants of a link to measured collectives, and read logs of nccl-tests.

The loss is the mean absolute logarithm of predicted over measured time, with equal weight for every row. A small
penalty keeps the constants near their present values. One constant at a time moves over a geometric grid, which narrows
from round to round. At the end, a constant returns to its old value if the new value does not explain the rows better
than chance (Akaike's criterion). So constants that the log does not measure do not change. The fit is deterministic.

Read `read_log` first, then `calibrate_link`, which calls `fit_link`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_FLOOR, Context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilecast import collectives
from tilecast.collectives import RankGroup
from tilecast.hardware import MESSAGE, PROTOCOLS, Link
from tilecast.spec import Columns, Floats, SpecError

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Measurements(Columns):
    """Measured times of R collectives, as columns (R,)."""

    collective: npt.NDArray[np.str_]
    """Name of the collective, a key of `collectives.COLLECTIVES`."""
    size_bytes: Floats
    """Bytes of the whole buffer of one rank."""
    ranks: Floats
    """Number of ranks in the group."""
    local: Floats
    """Number of ranks of the group in each node."""
    node_ranks: Floats
    """Number of ranks of a node that use the network at the same time."""
    seconds: Floats
    """Measured time."""

    def __len__(self) -> int:
        return len(self.size_bytes)

    @classmethod
    def concatenate(cls, parts: Sequence[Measurements]) -> Measurements:
        """Return one table with the rows of all parts, in order."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    def group(self) -> RankGroup:
        """Return the communication group of each row, (R,)."""
        return RankGroup(self.ranks, self.local, self.node_ranks)


def predict_collectives(measured: Measurements, intra: Link, inter: Link) -> Floats:
    """Return the predicted seconds of each measured collective, (R,).

    Args:
        measured: the collectives.
        intra: the link inside a node.
        inter: the link between nodes.
    """
    seconds = np.zeros(len(measured))
    for name in np.unique(measured.collective):
        rows = measured.collective == name
        part = measured.take(rows)
        seconds[rows] = collectives.fastest_collective_s(str(name), part.size_bytes, part.group(), intra, inter)
    return seconds


BULK = ("simple", "share")
"""Constant that is not fitted. The rate of the Simple protocol, which moves bulk data, is fitted as `efficiency`."""
CONSTANTS = (
    "efficiency", "own_share", "peer_s", "reduction_bytes_per_s", "reduction_start_s",
    *(
        f"{name}.{part}"
        for name in (*PROTOCOLS, MESSAGE) for part in ("start_s", "hop_s", "share") if (name, part) != BULK
    ),
)  # fmt: skip
"""Names of the constants that are fitted, which are fields of a link and of its protocols. A constant that a link lacks
or that is 0 is not fitted."""
SEARCH_RANGE = 8.0
"""Factor by which a constant may move up or down in the first round. In each later round it is the square root of the
factor of the round before."""
REGULARIZATION = 0.001
"""Penalty for moving one constant by a factor of e."""


MIN_GAIN = 2.0
"""Least gain for which a constant keeps its new value (Akaike's criterion). The gain is the number of rows times the
logarithm of the ratio of errors."""


def fit_link(link: Link, measured: Measurements, other_link: Link, rounds: int = 6) -> Link:
    """Return a copy of a link whose constants fit measured collectives best.

    Constants that the collectives do not determine keep their values.

    Args:
        link: the link to fit, with the constants at which the search starts.
        measured: collectives that use the link.
        other_link: the link between nodes if `link` is inside a node, or the reverse. It does not change.
        rounds: number of times that every constant moves.
    """

    def error(candidate: Link) -> float:
        """Return the mean absolute logarithm of predicted over measured seconds."""
        return float(np.mean(np.abs(np.log(_predict_on_links(candidate, other_link, measured) / measured.seconds))))

    def loss(candidate: Link) -> float:
        """Return the error plus the penalty for moved constants."""
        return error(candidate) + REGULARIZATION * sum(
            abs(math.log(read_constant(candidate, name) / start)) for name, start in begin.items()
        )

    def is_measured(name: str) -> bool:
        """Return whether the time of any measured collective depends on a constant."""
        links = (link, _scale_constant(link, name, 1.1))
        before, after = (_predict_on_links(one, other_link, measured) for one in links)
        return bool(np.abs(np.log(after / before)).max() >= MIN_TIME_SHARE * np.log(1.1))

    begin = {name: value for name in CONSTANTS if (value := read_constant(link, name)) and is_measured(name)}
    best, least = link, loss(link)
    for turn in range(rounds):
        for name in begin:
            reach = SEARCH_RANGE ** (0.5**turn)
            efficiency = min(1 / max(protocol.share for protocol in best.protocols.values()), 1.0)
            limits = {"share": 1 / best.efficiency, "efficiency": efficiency, "own_share": 1.0}
            upper_limit = limits.get(name.split(".")[-1], np.inf)
            for value in np.minimum(read_constant(best, name) * np.geomspace(1 / reach, reach, 15), upper_limit):
                candidate = _set_constant(best, name, _round_to_three_digits(value, upper_limit))
                if (reached := loss(candidate)) < least:
                    best, least = candidate, reached
    return _restore_insignificant_constants(link, best, error, len(measured))


def _predict_on_links(link: Link, other_link: Link, measured: Measurements) -> Floats:
    """Return the predicted seconds of each measured collective, (R,).

    One of the two links is inside nodes, and the other one is between nodes.
    """
    return predict_collectives(measured, *((other_link, link) if link.per_node else (link, other_link)))


def _restore_insignificant_constants(link: Link, fitted: Link, error: Callable[[Link], float], rows: int) -> Link:
    """Return the fitted link without changes of constants that explain the measurements no better than chance.

    One constant after another returns to its value in `link`, until the next one would increase the error too much.

    Args:
        link: the link before the fit.
        fitted: the link after the fit.
        error: function that returns the error of a link on the measurements.
        rows: number of measurements.
    """
    moved = {
        name
        for name in CONSTANTS
        if not np.isclose(
            _compute_effective_value(fitted, name), _compute_effective_value(link, name), rtol=1e-3, atol=0
        )
    }
    while moved:
        restored = {
            name: _scale_constant(
                fitted, name, _compute_effective_value(link, name) / _compute_effective_value(fitted, name)
            )
            for name in sorted(moved)
        }
        errors = {name: error(one) for name, one in restored.items()}
        name = min(errors, key=lambda one: (errors[one], one))
        if rows * np.log((errors[name] + _ROUNDED) / (error(fitted) + _ROUNDED)) >= MIN_GAIN:
            break
        fitted = restored[name]
        moved.remove(name)
    return fitted


def _compute_effective_value(link: Link, name: str) -> float:
    """Return the value of a link's constant. The `share` of a protocol is multiplied by the link's efficiency."""
    return read_constant(link, name) * (link.efficiency if name.endswith(".share") else 1.0)


def _scale_constant(link: Link, name: str, factor: float) -> Link:
    """Return a copy of a link with one constant multiplied by a factor.

    If this is the efficiency, the shares of all protocols except Simple are divided by the factor. So the rates of
    these protocols do not change.
    """
    if name != "efficiency":
        return _set_constant(link, name, read_constant(link, name) * factor)
    protocols = {
        key: one if (key, "share") == BULK else replace(one, share=one.share / factor)
        for key, one in link.protocols.items()
    }
    return replace(link, efficiency=link.efficiency * factor, protocols=protocols)


MIN_TIME_SHARE = 0.2
"""Least fraction of a collective's time that depends on a constant, for a measurement to determine the constant."""
_ROUNDED = 5e-4
"""Error that remains because constants are rounded to three digits."""


def _round_to_three_digits(value: float, upper_limit: float) -> float:
    """Return the value rounded to three significant digits. If that exceeds `upper_limit`, round down instead."""
    nearest = float(f"{value:.3g}")
    return nearest if nearest <= upper_limit else float(Context(prec=3, rounding=ROUND_FLOOR).create_decimal(value))


def read_constant(link: Link, name: str) -> float:
    """Return the value of a link's constant with a name of `CONSTANTS`. If the link lacks the constant, return 0."""
    part, _, field = name.rpartition(".")
    if not part:
        return float(getattr(link, field))
    return float(getattr(link.protocols[part], field)) if part in link.protocols else 0.0


def _set_constant(link: Link, name: str, value: float) -> Link:
    """Return a copy of a link in which the constant with a name of `CONSTANTS` has a new value."""
    part, _, field = name.rpartition(".")
    change: dict[str, Any] = {field: value}
    if not part:
        return replace(link, **change)
    return replace(link, protocols={**link.protocols, part: replace(link.protocols[part], **change)})


LEAST_US, MOST = 1e-3, 2**53
"""Shortest time in a log, in microseconds, and largest value of a time (microseconds) or a size (bytes)."""

_PROGRAM = re.compile(rf"({'|'.join(collectives.PROGRAMS)}|[a-z]+)_perf(?![a-z])")
"""Program of nccl-tests in a command line or a file name, with any text around it."""
_RANK = re.compile(
    r"#\s+Rank\s+(\d+)(?:\s+Group\s+(\d+))?\s+Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*\S)?"
)
# A launcher may write a prefix before a row: mpirun's [1,0]<stdout>:, srun's 0:, pdsh's host:, kubectl's [pod/…] or a
# time.
_ROW = re.compile(
    r"^\s*(?:\[[^\]]*\](?:<\w+>:?)?|[\w.-]+:(?=\s)|\S*\d\d:\d\d:\d\d\S*)?"
    r"\s*(\d+)\s+(\d+)\s+[a-z]\w*\s+\w+\s+-?\d+\s+(\d\S*)\s+(\d\S*)\s+(\d\S*)\s+(\d\S*|N/A)"
)


@dataclass(frozen=True, slots=True)
class NcclTestsLog:
    """Content of a log of nccl-tests: the out-of-place times, and the GPU on which the ranks ran."""

    measured: Measurements
    gpu: str

    @property
    def nodes(self) -> int:
        """Largest number of nodes of a group in the log."""
        return int(self.measured.group().nodes.max())


def read_log(path: Path) -> NcclTestsLog:
    """Return the measurements in a file with the standard output of nccl-tests (all_reduce_perf and others).

    The file contains one or more runs, perhaps with lines of a launcher or of NCCL in between. `# Rank` lines name the
    ranks of a run. A row has size, count, type, operation, root, and then the time, bandwidths and number of wrong
    elements out of place (nccl-tests, src/util.cu).

    Raises:
        SpecError: the file cannot be read, or is not a log of nccl-tests. A row has an unknown collective, an invalid
            size or time, or wrong elements.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise SpecError(str(path), "cannot be read", str(error.strerror or error)) from None
    name = match[1] if (match := _PROGRAM.search(path.name)) else ""
    hosts: list[tuple[str, str]] = []
    parts: list[Measurements] = []
    gpu, fresh = "", True
    for number, line in enumerate(lines, 1):
        if program := _PROGRAM.search(line):
            name = program[1]
        if rank := _RANK.search(line):
            hosts = [] if fresh else hosts
            hosts.append((rank[2] or "0", rank[3]))
            gpu, fresh = rank[4] or gpu, False
        elif row := _ROW.match(line):
            fresh = True
            if row[1].strip("0"):
                parts.append(_parse_row(f"{path}: line {number}", name, hosts, row))
    if not parts:
        raise SpecError(str(path), "holds no row of nccl-tests", "give what all_reduce_perf or another of them printed")
    return NcclTestsLog(Measurements.concatenate(parts), gpu)


def _parse_row(where: str, name: str, hosts: Sequence[tuple[str, str]], row: re.Match[str]) -> Measurements:
    """Return a row of a log as a table of one measurement.

    Args:
        where: file and line, for messages.
        name: name of the nccl-tests program without `_perf`. Empty if the log does not name the program.
        hosts: group number and host of each rank of the run.
        row: fields of the row.

    Raises:
        SpecError: the row has an invalid value, or the ranks of the run do not form equal groups of two or more.
    """
    if name not in collectives.PROGRAMS:
        known = ", ".join(f"{known}_perf" for known in collectives.PROGRAMS)
        problem = f"{name}_perf is not priced" if name else "the log does not name the collective"
        raise SpecError(
            where, problem, f"give the log of one of {known}, with the command line in it or in its file name"
        )
    if not hosts:
        raise SpecError(where, "no '# Rank' line before the row says which GPUs took part", "give the whole log")
    if row[6] not in ("0", "N/A"):
        raise SpecError(where, f"{row[6][:40]} elements were wrong", "repair the system before you measure it")
    group = hosts[0][0]
    mine = [host for of, host in hosts if of == group]
    ranks, nodes = len(mine), len(set(mine))
    if ranks < 2:
        raise SpecError(where, "a single rank moves nothing over a link", "run on two GPUs or more")
    each = {mine.count(host) for host in mine}
    if len(each) > 1:
        raise SpecError(where, f"{ranks} ranks are spread unevenly over {nodes} nodes", "run as many on every node")
    try:
        time_us = float(row[3])
    except ValueError:
        time_us = np.nan
    if not LEAST_US <= time_us <= MOST:
        problem = f"time {row[3][:40]!r} is no number from {LEAST_US:g} us"
        raise SpecError(where, problem, "give the log as it was printed")
    digits = row[1].lstrip("0")
    if len(digits) > len(str(MOST)) or int(digits) > MOST:
        raise SpecError(where, f"size {digits[:40]!r} is more than 2**53 bytes", "give the log as it was printed")
    on_node = sum(host == mine[0] for _, host in hosts)
    numbers = (float(digits), float(ranks), float(min(each)), float(on_node), time_us * 1e-6)
    return Measurements(np.array([collectives.PROGRAMS[name]]), *(np.array([value]) for value in numbers))


def format_toml(link: Link, source: str) -> str:
    """Return a link and its constants as the text of a link file (`LinkFile`).

    Args:
        link: the link. The file contains only the name of a link in `Link.beyond`.
        source: source of the constants, which the file names.
    """
    facts: dict[str, object] = {
        "name": link.name,
        "kind": link.kind,
        "bandwidth_gb_per_s": link.bandwidth_bytes_per_s / 1e9,
        "efficiency": link.efficiency,
        "per_node": link.per_node,
        "nics": link.nics,
        "gpu_nics": link.gpu_nics,
        "switched": link.switched,
        "wired": [list(point) for point in link.wired],
        "domain": link.domain,
        "reduction_gb_per_s": link.reduction_bytes_per_s / 1e9,
        "tiers": [{"nodes": tier.nodes, "oversubscription": tier.oversubscription} for tier in link.tiers],
    }
    if link.beyond:
        facts["beyond"] = link.beyond.name
    constants: dict[str, object] = {
        "peer_us": link.peer_s * 1e6,
        "own_share": link.own_share,
        "reduction_start_us": link.reduction_start_s * 1e6,
        "spread": link.spread,
        "source": source,
    }
    for name, one in link.protocols.items():
        constants[name] = {"start_us": one.start_s * 1e6, "hop_us": one.hop_s * 1e6, "share": one.share}
    lines = [f"{key} = {_format_value(value)}" for key, value in facts.items()]
    lines += ["", "[sources]", f"constants = {_format_value(source)}", "", "[protocols]"]
    return "\n".join([*lines, *(f"{key} = {_format_value(value)}" for key, value in constants.items()), ""])


def _format_value(value: object) -> str:
    """Return a value as TOML text. Numbers have twelve significant digits."""
    # With fewer digits, a constant could leave its bounds.
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_format_value(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_format_value(inner) for inner in value) + "]"
    return f"{value:.12g}" if isinstance(value, float) else json.dumps(value)


@dataclass(frozen=True, slots=True)
class LinkCalibration:
    """A fitted link, with the errors of predictions before and after the fit and in cross-validation."""

    link: Link
    errors: tuple[tuple[str, int, float, float, float], ...]
    """Collective and size class, number of measurements, and three mean absolute relative errors. They are the errors
    of the old link, of the fitted link, and of two-fold cross-validation."""


def calibrate_link(link: Link, measured: Measurements, other_link: Link, name: str) -> LinkCalibration:
    """Return a link fitted to measured collectives, with a new name and with its prediction errors.

    The 90 % interval of the fitted link comes from two-fold cross-validation.

    Args:
        link: the link to fit, with the constants at which the search starts.
        measured: the collectives.
        other_link: the link between nodes if `link` is inside a node, or the reverse. It does not change.
        name: name of the fitted link.
    """

    def relative_errors(fitted: Link, rows: Measurements) -> Floats:
        """Return the relative error of each predicted time, (R,)."""
        return np.asarray(_predict_on_links(fitted, other_link, rows) / rows.seconds - 1)

    after = fit_link(link, measured, other_link)
    even = np.arange(len(measured)) % 2 == 0
    unseen = np.full(len(measured), np.nan)
    if len(measured) > 1:
        for half in (even, ~even):
            unseen[half] = relative_errors(fit_link(link, measured.take(~half), other_link), measured.take(half))
    table = np.abs([relative_errors(link, measured), relative_errors(after, measured), unseen])
    lines = []
    for collective in np.unique(measured.collective):
        for title, rows in (("from 1 MiB", measured.size_bytes >= 2**20), ("below", measured.size_bytes < 2**20)):
            of = rows & (measured.collective == collective)
            if of.any():
                before, now, left_out = table[:, of].mean(axis=1)
                lines.append((f"{collective} {title}", int(of.sum()), before, now, left_out))
    spread = float(np.quantile(np.abs(np.log1p(unseen)), 0.9)) if len(measured) > 1 else link.spread
    return LinkCalibration(replace(after, name=name, spread=float(f"{spread:.2g}")), tuple(lines))
