"""The constants of a link from measured collectives, and nccl-tests' logs as measurements.

The loss is the mean absolute logarithm of predicted over measured, every row alike, with a light pull towards the
constants that are there. One constant at a time moves over a geometric grid that narrows; afterwards one that explains
the rows no better than chance (Akaike's criterion) returns to where it was, so that what the log did not measure stays.
The same rows give the same constants.
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
from tilecast.collectives import Group
from tilecast.hardware import MESSAGE, PROTOCOLS, Link
from tilecast.spec import Columns, Floats, SpecError

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Measurements(Columns):
    """Collectives as they were measured: names, whole buffers in bytes, groups, seconds; columns (R,)."""

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
        """All rows of the parts, in order."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    def group(self) -> Group:
        """The groups of the rows."""
        return Group(self.ranks, self.local, self.node_ranks)


def predict(measured: Measurements, intra: Link, inter: Link) -> Floats:
    """Seconds of every row on those links, (R,)."""
    seconds = np.zeros(len(measured))
    for name in np.unique(measured.collective):
        rows = measured.collective == name
        part = measured.take(rows)
        seconds[rows] = collectives.seconds(str(name), part.size_bytes, part.group(), intra, inter)
    return seconds


BULK = ("simple", "share")
"""Bulk data move in the Simple protocol: its share is the whole of `efficiency`."""
CONSTANTS = (
    "efficiency", "own_share", "peer_s", "reduction_bytes_per_s", "reduction_start_s",
    *(
        f"{name}.{part}"
        for name in (*PROTOCOLS, MESSAGE) for part in ("start_s", "hop_s", "share") if (name, part) != BULK
    ),
)  # fmt: skip
"""What is fitted: fields of a link, and of its protocols. A constant that is 0 or absent stays so."""
REACH = 8.0
"""How far a constant moves in the first round, as a factor either way; a round later the root of it."""
PULL = 0.001
"""Loss of moving one constant by a factor of e."""


GAIN = 2.0
"""By how much a moved constant has to raise the rows' log-likelihood, times two: Akaike's price of a parameter."""


def fit(link: Link, measured: Measurements, other: Link, rounds: int = 6) -> Link:
    """The link with the constants that fit the rows best; those that the rows do not measure stay.

    Args:
        link: where the search starts: the link between GPUs of a node, or the network if it is `per_node`.
        measured: rows that use the link.
        other: the network, or the link between GPUs of a node; it stays as it is.
        rounds: how often every constant moves.
    """

    def error(tried: Link) -> float:
        intra, inter = (other, tried) if link.per_node else (tried, other)
        return float(np.mean(np.abs(np.log(predict(measured, intra, inter) / measured.seconds))))

    def loss(tried: Link) -> float:
        return error(tried) + PULL * sum(abs(math.log(constant(tried, name) / start)) for name, start in begin.items())

    def counts(name: str) -> bool:
        """Whether some row's time goes with the constant."""
        pairs = [(other, one) if link.per_node else (one, other) for one in (link, _scaled(link, name, 1.1))]
        before, after = (predict(measured, *pair) for pair in pairs)
        return bool(np.abs(np.log(after / before)).max() >= FELT * np.log(1.1))

    begin = {name: value for name in CONSTANTS if (value := constant(link, name)) and counts(name)}
    best, least = link, loss(link)
    for turn in range(rounds):
        for name in begin:
            reach = REACH ** (0.5**turn)
            limits = {"share": 1 / best.efficiency, "efficiency": min(1 / _most_share(best), 1.0), "own_share": 1.0}
            most = limits.get(name.split(".")[-1], np.inf)
            for value in np.minimum(constant(best, name) * np.geomspace(1 / reach, reach, 15), most):
                tried = _with(best, name, _three_digits(value, most))
                if (reached := loss(tried)) < least:
                    best, least = tried, reached
    return _unmoved(link, best, error, len(measured))


def _unmoved(link: Link, fitted: Link, error: Callable[[Link], float], rows: int) -> Link:
    """The fitted link with those constants as `link` has them that explain the rows no better than chance."""
    moved = {name for name in CONSTANTS if not np.isclose(_rate(fitted, name), _rate(link, name), rtol=1e-3, atol=0)}
    while moved:
        restored = {name: _scaled(fitted, name, _rate(link, name) / _rate(fitted, name)) for name in sorted(moved)}
        errors = {name: error(one) for name, one in restored.items()}
        name = min(errors, key=lambda one: (errors[one], one))
        if rows * np.log((errors[name] + _ROUNDED) / (error(fitted) + _ROUNDED)) >= GAIN:
            break
        fitted = restored[name]
        moved.remove(name)
    return fitted


def _rate(link: Link, name: str) -> float:
    """A constant as it is measured: a share as the rate that it makes with the efficiency."""
    return constant(link, name) * (link.efficiency if name.endswith(".share") else 1.0)


def _scaled(link: Link, name: str, factor: float) -> Link:
    """The link with one constant times a factor and all rates but its own as they were: the efficiency changes without
    the rates of other protocols than the bulk one."""
    if name != "efficiency":
        return _with(link, name, constant(link, name) * factor)
    protocols = {
        key: one if (key, "share") == BULK else replace(one, share=one.share / factor)
        for key, one in link.protocols.items()
    }
    return replace(link, efficiency=link.efficiency * factor, protocols=protocols)


FELT = 0.2
"""Least share of a row's time that goes with a constant for the row to measure it."""
_ROUNDED = 5e-4
"""What three digits of a constant leave of an error."""


def _three_digits(value: float, most: float) -> float:
    """The value to three digits: the nearest, or the one below where the nearest is more than `most`."""
    nearest = float(f"{value:.3g}")
    return nearest if nearest <= most else float(Context(prec=3, rounding=ROUND_FLOOR).create_decimal(value))


def _most_share(link: Link) -> float:
    return max(protocol.share for protocol in link.protocols.values())


def constant(link: Link, name: str) -> float:
    """A link's value of one of `CONSTANTS`, 0 where it has none."""
    part, _, field = name.rpartition(".")
    if not part:
        return float(getattr(link, field))
    return float(getattr(link.protocols[part], field)) if part in link.protocols else 0.0


def _with(link: Link, name: str, value: float) -> Link:
    part, _, field = name.rpartition(".")
    change: dict[str, Any] = {field: value}
    if not part:
        return replace(link, **change)
    return replace(link, protocols={**link.protocols, part: replace(link.protocols[part], **change)})


LEAST_US, MOST = 1e-3, 2**53
"""The shortest time in microseconds that a log may hold, and its largest time and size."""

_PROGRAM = re.compile(rf"({'|'.join(collectives.PROGRAMS)}|[a-z]+)_perf(?![a-z])")
"""A program of nccl-tests in a command line or a file's name, with whatever stands around it."""
_RANK = re.compile(
    r"#\s+Rank\s+(\d+)(?:\s+Group\s+(\d+))?\s+Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*\S)?"
)
# Before a row may stand what a launcher puts there: mpirun's [1,0]<stdout>:, srun's 0:, pdsh's host:, kubectl's [pod/…]
# or a time.
_ROW = re.compile(
    r"^\s*(?:\[[^\]]*\](?:<\w+>:?)?|[\w.-]+:(?=\s)|\S*\d\d:\d\d:\d\d\S*)?"
    r"\s*(\d+)\s+(\d+)\s+[a-z]\w*\s+\w+\s+-?\d+\s+(\d\S*)\s+(\d\S*)\s+(\d\S*)\s+(\d\S*|N/A)"
)


@dataclass(frozen=True, slots=True)
class Log:
    """What an nccl-tests log holds: out-of-place times, and the GPU that its ranks ran on."""

    measured: Measurements
    gpu: str

    @property
    def nodes(self) -> int:
        """Most nodes of any run."""
        return int(self.measured.group().nodes.max())


def read_log(path: Path) -> Log:
    """The standard output of nccl-tests (all_reduce_perf and the like), one run or several after each other, with
    whatever a launcher or NCCL wrote between: `# Rank` lines say who took part, and rows hold size, count, type,
    operation, root, and time, bandwidths and errors out of place (nccl-tests, src/util.cu).

    Raises:
        SpecError: the file cannot be read, is no such log, or holds a collective, a time or a result that is wrong.
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
                parts.append(_row(f"{path}: line {number}", name, hosts, row))
    if not parts:
        raise SpecError(str(path), "holds no row of nccl-tests", "give what all_reduce_perf or another of them printed")
    return Log(Measurements.concatenate(parts), gpu)


def _row(where: str, name: str, hosts: Sequence[tuple[str, str]], row: re.Match[str]) -> Measurements:
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


def toml(link: Link, source: str) -> str:
    """A link as a file of the `LinkFile` schema, its constants in it. Of a link that has another beyond its domain,
    the file names that one."""
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
    lines = [f"{key} = {_value(value)}" for key, value in facts.items()]
    lines += ["", "[sources]", f"constants = {_value(source)}", "", "[protocols]"]
    return "\n".join([*lines, *(f"{key} = {_value(value)}" for key, value in constants.items()), ""])


def _value(value: object) -> str:
    """A value as TOML writes it, numbers with twelve digits, so that constants stay within their bounds."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_value(inner) for inner in value) + "]"
    return f"{value:.12g}" if isinstance(value, float) else json.dumps(value)


@dataclass(frozen=True, slots=True)
class LinkCalibration:
    """A fitted link, and mean absolute errors of the rows: as it was, as it is, and when each half of the rows is
    predicted by a fit to the other half."""

    link: Link
    errors: tuple[tuple[str, int, float, float, float], ...]
    """Collective and size class, rows, before, after, left out."""


def calibrate(link: Link, measured: Measurements, other: Link, name: str) -> LinkCalibration:
    """Fit a link to the rows of a log under a new name. Its 90 % range becomes what the rows show that a fit to the
    others did not see.

    Args:
        link: where the constants start: between GPUs of a node, or the network if it is `per_node`.
        measured: the rows of a log.
        other: the other of the two, which stays.
        name: what the fitted link is called.
    """

    def errors(fitted: Link, rows: Measurements) -> Floats:
        pair = (other, fitted) if link.per_node else (fitted, other)
        return np.asarray(predict(rows, *pair) / rows.seconds - 1)

    after = fit(link, measured, other)
    even = np.arange(len(measured)) % 2 == 0
    unseen = np.full(len(measured), np.nan)
    if len(measured) > 1:
        for half in (even, ~even):
            unseen[half] = errors(fit(link, measured.take(~half), other), measured.take(half))
    table = np.abs([errors(link, measured), errors(after, measured), unseen])
    lines = []
    for collective in np.unique(measured.collective):
        for title, rows in (("from 1 MiB", measured.size_bytes >= 2**20), ("below", measured.size_bytes < 2**20)):
            of = rows & (measured.collective == collective)
            if of.any():
                before, now, left_out = table[:, of].mean(axis=1)
                lines.append((f"{collective} {title}", int(of.sum()), before, now, left_out))
    spread = float(np.quantile(np.abs(np.log1p(unseen)), 0.9)) if len(measured) > 1 else link.spread
    return LinkCalibration(replace(after, name=name, spread=float(f"{spread:.2g}")), tuple(lines))
