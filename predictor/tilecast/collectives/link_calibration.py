"""Fit the constants of a link to measured collectives, and read logs of nccl-tests.

The loss is the mean absolute logarithm of predicted over measured time, with equal weight for every row, plus a light
pull towards the constants that the link has. One constant at a time moves over a geometric grid, which narrows from
round to round. Afterwards each constant that explains the rows no better than chance (Akaike's criterion) returns to
its old value. So constants that the log did not measure stay. The same rows always give the same constants.

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
    """Measured collectives, with one row per measurement, as columns of shape (R,).

    A row has the collective's name, the whole buffer in bytes, the group's ranks, and the time in seconds.
    """

    collective: npt.NDArray[np.str_]
    size_bytes: Floats
    ranks: Floats
    local: Floats
    node_ranks: Floats
    seconds: Floats

    def __len__(self) -> int:
        return len(self.size_bytes)

    @classmethod
    def concatenate(cls, parts: Sequence[Measurements]) -> Measurements:
        """Return all rows of the parts, in order."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    def group(self) -> RankGroup:
        """Return the communication groups of the rows."""
        return RankGroup(self.ranks, self.local, self.node_ranks)


def predict_collectives(measured: Measurements, intra: Link, inter: Link) -> Floats:
    """Return the predicted seconds of every row on these links, (R,)."""
    seconds = np.zeros(len(measured))
    for name in np.unique(measured.collective):
        rows = measured.collective == name
        part = measured.take(rows)
        seconds[rows] = collectives.fastest_collective_s(str(name), part.size_bytes, part.group(), intra, inter)
    return seconds


BULK = ("simple", "share")
"""Constant that is not fitted, because `efficiency` already describes bulk data, which move in the Simple protocol."""
CONSTANTS = (
    "efficiency", "own_share", "peer_s", "reduction_bytes_per_s", "reduction_start_s",
    *(
        f"{name}.{part}"
        for name in (*PROTOCOLS, MESSAGE) for part in ("start_s", "hop_s", "share") if (name, part) != BULK
    ),
)  # fmt: skip
"""Constants that are fitted: fields of a link and of its protocols. A constant that is 0 or absent stays so."""
SEARCH_RANGE = 8.0
"""Factor by which a constant may move up or down in the first round; each later round uses the root of it."""
REGULARIZATION = 0.001
"""Loss of moving one constant by a factor of e."""


MIN_GAIN = 2.0
"""Least gain of a constant that stays moved: rows times the logarithm of the ratio of errors (Akaike's price)."""


def fit_link(link: Link, measured: Measurements, other: Link, rounds: int = 6) -> Link:
    """Return the link with the constants that fit the rows best.

    Constants that the rows do not determine keep their values.

    Args:
        link: the link at which the search starts. It is between nodes if it is `per_node`, else inside a node.
        measured: rows that use the link.
        other: the link between nodes if `link` is inside a node, and vice versa. It does not change.
        rounds: number of times that every constant moves.
    """

    def error(candidate: Link) -> float:
        return float(np.mean(np.abs(np.log(_predict_beside(candidate, other, measured) / measured.seconds))))

    def loss(candidate: Link) -> float:
        return error(candidate) + REGULARIZATION * sum(
            abs(math.log(read_constant(candidate, name) / start)) for name, start in begin.items()
        )

    def is_measured(name: str) -> bool:
        """Return whether the time of any row depends on the constant `name`."""
        links = (link, _scale_constant(link, name, 1.1))
        before, after = (_predict_beside(one, other, measured) for one in links)
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
    return _restore_insignificant(link, best, error, len(measured))


def _predict_beside(link: Link, other: Link, measured: Measurements) -> Floats:
    """Return the predicted seconds of every row, (R,), on two links: one inside nodes, the other between nodes."""
    return predict_collectives(measured, *((other, link) if link.per_node else (link, other)))


def _restore_insignificant(link: Link, fitted: Link, error: Callable[[Link], float], rows: int) -> Link:
    """Return the fitted link without the changes that explain the rows no better than chance.

    These constants return to their values in `link`, one after the other.
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
    """Return a constant as measured; a protocol's share is multiplied by the efficiency, which makes it a rate."""
    return read_constant(link, name) * (link.efficiency if name.endswith(".share") else 1.0)


def _scale_constant(link: Link, name: str, factor: float) -> Link:
    """Return the link with one constant multiplied by a factor and the rates of all other constants unchanged.

    A change of the efficiency leaves the rates of all protocols but the bulk one unchanged.
    """
    if name != "efficiency":
        return _set_constant(link, name, read_constant(link, name) * factor)
    protocols = {
        key: one if (key, "share") == BULK else replace(one, share=one.share / factor)
        for key, one in link.protocols.items()
    }
    return replace(link, efficiency=link.efficiency * factor, protocols=protocols)


MIN_TIME_SHARE = 0.2
"""Least share of a row's time that must depend on a constant for the row to measure it."""
_ROUNDED = 5e-4
"""Error that remains because constants have three digits."""


def _round_to_three_digits(value: float, upper_limit: float) -> float:
    """Return the value rounded to three digits. If that exceeds `upper_limit`, return the value rounded down."""
    nearest = float(f"{value:.3g}")
    return nearest if nearest <= upper_limit else float(Context(prec=3, rounding=ROUND_FLOOR).create_decimal(value))


def read_constant(link: Link, name: str) -> float:
    """Return the value of a link's constant, which is named in `CONSTANTS`. If the link lacks it, return 0."""
    part, _, field = name.rpartition(".")
    if not part:
        return float(getattr(link, field))
    return float(getattr(link.protocols[part], field)) if part in link.protocols else 0.0


def _set_constant(link: Link, name: str, value: float) -> Link:
    """Return a copy of the link with `value` for the constant `name`, which is named in `CONSTANTS`."""
    part, _, field = name.rpartition(".")
    change: dict[str, Any] = {field: value}
    if not part:
        return replace(link, **change)
    return replace(link, protocols={**link.protocols, part: replace(link.protocols[part], **change)})


LEAST_US, MOST = 1e-3, 2**53
"""Shortest time in microseconds that a log may hold, and its largest time in microseconds and size in bytes."""

_PROGRAM = re.compile(rf"({'|'.join(collectives.PROGRAMS)}|[a-z]+)_perf(?![a-z])")
"""Program of nccl-tests in a command line or a file's name, with any text around it."""
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
    """Content of a log of nccl-tests: the out-of-place times, and the GPU that its ranks ran on."""

    measured: Measurements
    gpu: str

    @property
    def nodes(self) -> int:
        """Largest number of nodes of any run."""
        return int(self.measured.group().nodes.max())


def read_log(path: Path) -> NcclTestsLog:
    """Read the standard output of nccl-tests (all_reduce_perf and others).

    The file has one run or several after each other, and may have lines of a launcher or of NCCL between them. `# Rank`
    lines name the ranks of a run. Rows have size, count, type, operation, root, and the time, bandwidths and errors out
    of place (nccl-tests, src/util.cu).

    Raises:
        SpecError: the file cannot be read, is no such log, or has a collective, a time or a result that is wrong.
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
    """Return a row of a log as a measurement of one collective.

    Args:
        where: file and line, for messages.
        name: name of the collective.
        hosts: number of the group and host of each rank of the run.
        row: fields of the row.

    Raises:
        SpecError: the row has a wrong value, or the ranks form no group that uses a link.
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
    """Return a link and its constants as the text of a file of the `LinkFile` schema.

    If the link has a link beyond its domain (`Link.beyond`), the file contains only the name of that other link.
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
    """Return a value as TOML text.

    Numbers have twelve digits, so that constants stay within their bounds.
    """
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_format_value(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_format_value(inner) for inner in value) + "]"
    return f"{value:.12g}" if isinstance(value, float) else json.dumps(value)


@dataclass(frozen=True, slots=True)
class LinkCalibration:
    """A fitted link, and the mean absolute relative errors of its predictions for the measured rows.

    There are three errors: with the old constants, with the fitted constants, and in cross-validation. There, each half
    of the rows is predicted by a fit to the other half.
    """

    link: Link
    errors: tuple[tuple[str, int, float, float, float], ...]
    """Collective and size class, number of rows, and errors before the fit, after it, and of rows left out."""


def calibrate_link(link: Link, measured: Measurements, other: Link, name: str) -> LinkCalibration:
    """Fit a link to the rows of a log under a new name.

    The 90 % range of the fitted link comes from the errors of rows that the fit did not use.

    Args:
        link: the link at which the search starts. It is between nodes if it is `per_node`, else inside a node.
        measured: the rows of a log.
        other: the link between nodes if `link` is inside a node, and vice versa. It does not change.
        name: name of the fitted link.
    """

    def relative_errors(fitted: Link, rows: Measurements) -> Floats:
        return np.asarray(_predict_beside(fitted, other, rows) / rows.seconds - 1)

    after = fit_link(link, measured, other)
    even = np.arange(len(measured)) % 2 == 0
    unseen = np.full(len(measured), np.nan)
    if len(measured) > 1:
        for half in (even, ~even):
            unseen[half] = relative_errors(fit_link(link, measured.take(~half), other), measured.take(half))
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
