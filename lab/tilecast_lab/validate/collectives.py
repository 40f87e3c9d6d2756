"""Comparison of predicted collectives with measured ones, and with what line rates alone would predict.

A table has a row per measurement: `op`, `bytes` (the whole buffer of one rank), `n_gpus`, and what connects the GPUs:
either the names of links in `link` and `network`, or a `gpu` and the source's own words in `interconnect`. The columns
`n_nodes`, `gpus_per_node`, `impl` and `latency_us` are optional.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tilecast import collectives
from tilecast.collectives.link_calibration import Measurements, predict_collectives
from tilecast.hardware import Gpu, Link, find_gpu, find_link, normalise_product
from tilecast.spec import Floats, SpecError
from tilecast.validate import Track, iterate_without_progress
from tilecast_lab.validate import csvfile
from tilecast_lab.validate.networks import intra_link, names_network, network_link
from tilecast_lab.validate.table import ASSUMED

NEEDED = ("op", "bytes", "n_gpus")

UNPRICED = ("broadcast", "reduce", "gather", "scatter", "alltoallv", "hypercube")
"""Collectives of nccl-tests that no modelled training step uses."""

REASONS: Mapping[str, str] = {
    "unpriced-collective": "a collective that no training step here uses",
    "unknown-gpu": "the GPU is not among the hardware files",
    "single-rank": "one GPU alone moves nothing over a link",
    "empty-buffer": "no byte is moved",
    "custom-kernel": "not NCCL's kernel but a framework's own",
    "network-not-stated": "the ranks span nodes and the table does not say which network joins them",
}
"""Reasons for which a row is not predicted, by their codes."""

NODE_GPUS = 8
"""GPUs per node, used where a table states the network's rate per GPU."""

CLASSES: tuple[tuple[str, float], ...] = (("<64 KiB", 2**16), ("<1 MiB", 2**20), ("<64 MiB", 2**26), ("more", np.inf))
"""Classes of buffer sizes with their upper ends in bytes."""


@dataclass(frozen=True, slots=True)
class CollectivesTable:
    """Measured table of R rows and its forecasts.

    Every column is (R,), in seconds, NaN where `reason` says why the row is not predicted.
    """

    header: list[str]
    cells: list[list[str]]
    measured: Measurements
    link: list[str]
    """Name of what connects the ranks: the network if they span nodes, else the link inside the node.

    It is the reason if no link is known.
    """
    seconds: Floats
    lower: Floats
    upper: Floats
    bound: Floats
    reason: list[str]


def read_collectives(path: Path) -> CollectivesTable:
    """Read a table of collectives, plain or gzipped, and forecast its rows.

    Raises:
        SpecError: the file is no such table, or a cell has an impossible value; the message names row and column.
    """
    header, cells = csvfile.read_csv(path)
    if missing := [name for name in NEEDED if name not in header]:
        remedy = "give a table with op, bytes, n_gpus, and gpu and interconnect or link"
        raise SpecError(str(path), f"lacks the columns {', '.join(missing)}", remedy)
    if not cells:
        raise SpecError(str(path), "holds no row", "give a row per measurement")
    columns = {name: [line[i] for line in cells] for i, name in enumerate(header)}
    measured, joined = read_measurements(path, columns)
    return _forecast(path, header, cells, columns, measured, joined)


def read_measurements(path: Path, columns: Mapping[str, list[str]]) -> tuple[Measurements, Floats]:
    """Return the measurements of a table, and the number of nodes that each row's NVLink domain joins, (R,)."""
    operations = [text.strip().lower() for text in columns["op"]]
    for row, name in enumerate(operations):
        if name not in collectives.SPELLINGS and name not in UNPRICED:
            known = ", ".join(collectives.COLLECTIVES)
            raise SpecError(_cell(path, row, "op"), f"unknown collective {name!r}", f"use one of {known}")
    size = _numbers(path, columns, "bytes", least=0)
    for row in np.flatnonzero((size > 0) & (size < 1))[:1]:
        raise SpecError(_cell(path, int(row), "bytes"), f"{size[row]:g} is less than a byte", "correct the cell")
    ranks = _numbers(path, columns, "n_gpus", least=1)
    nodes = _numbers(path, columns, "n_nodes", least=1, default=1)
    local = _numbers(path, columns, "gpus_per_node", least=1, default=np.nan)
    local = np.where(np.isnan(local), ranks / nodes, np.minimum(local, ranks))
    for row in np.flatnonzero((local != np.floor(local)) | (local * nodes != ranks))[:1]:
        problem = f"{ranks[row]:g} GPUs do not fill {nodes[row]:g} nodes evenly"
        raise SpecError(_cell(path, int(row), "n_nodes"), problem, "give GPUs that are a multiple of the nodes")
    domain = np.maximum(_domains(columns, len(ranks)), local)
    joint = np.where(ranks <= domain, ranks, np.where(ranks % domain == 0, domain, local))
    seconds = _numbers(path, columns, "latency_us", least=1e-3, default=np.nan) * 1e-6
    names = np.array([collectives.SPELLINGS.get(name, "") for name in operations])
    return Measurements(names, size, ranks, joint, joint, seconds), joint / local


def _domains(columns: Mapping[str, list[str]], count: int) -> Floats:
    """Return the GPUs of the NVLink domain that spans nodes by the words of each row (NVL72), else 1, (R,)."""
    found = [re.search(r"\bnvl(\d+)\b", words.lower()) for words in columns.get("interconnect", [""] * count)]
    return np.array([float(match[1]) if match else 1.0 for match in found])


def _cell(path: Path, row: int, column: str) -> str:
    return f"{path}: row {row + 1}: {column}"


def _numbers(
    path: Path, columns: Mapping[str, list[str]], name: str, *, least: float, default: float | None = None
) -> Floats:
    """Return a column as numbers; empty cells become the default if there is one.

    Raises:
        SpecError: a cell is no number from `least` to 2^53.
    """
    values = np.empty(len(columns["op"]))
    for row, text in enumerate(columns.get(name, [""] * len(values))):
        if not text.strip() and default is not None:
            values[row] = default
            continue
        try:
            values[row] = float(text)
        except ValueError:
            values[row] = np.nan
        if not least <= values[row] <= 2**53:
            raise SpecError(_cell(path, row, name), f"{text[:40]!r} is no number from {least:g}", "correct the cell")
    return values


def _forecast(
    path: Path,
    header: list[str],
    cells: list[list[str]],
    columns: Mapping[str, list[str]],
    measured: Measurements,
    nodes_joined: Floats,
) -> CollectivesTable:
    count = len(cells)
    custom = np.array([name.startswith("custom") for name in columns.get("impl", [""] * count)])
    reasons = {
        "unpriced-collective": measured.collective == "",
        "custom-kernel": custom,
        "single-rank": measured.ranks < 2,
        "empty-buffer": measured.size_bytes < 1,
    }
    reason = np.select(list(reasons.values()), list(reasons), "").tolist()
    link = [""] * count
    seconds, bound, spread = np.full((3, count), np.nan)
    for members, intra, inter in find_links(path, columns, measured, nodes_joined):
        spans_nodes = measured.ranks[members[0]] > measured.local[members[0]]
        joined = inter if spans_nodes else intra
        refusal = "unknown-gpu" if intra is None else "" if joined else "network-not-stated"
        for row in members:
            reason[row] = reason[row] or refusal
            link[row] = joined.name if joined else refusal
        if intra is None or refusal:
            continue
        rows = np.array([row for row in members if not reason[row]], dtype=np.int64)
        part, network = measured.take(rows), inter or find_link("ethernet-100")
        seconds[rows] = predict_collectives(part, intra, network)
        for name in np.unique(part.collective):
            of = rows[part.collective == name]
            one = measured.take(of)
            bound[of] = collectives.bandwidth_bound_s(str(name), one.size_bytes, one.group(), intra, network)
        inside = np.where(part.local > intra.domain, (intra.beyond or intra).spread, intra.spread)
        spread[rows] = network.spread if spans_nodes else inside
    lower, upper = seconds * np.exp(-spread), seconds * np.exp(spread)
    return CollectivesTable(header, cells, measured, link, seconds, lower, upper, bound, reason)


def find_links(
    path: Path, columns: Mapping[str, list[str]], measured: Measurements, nodes_joined: Floats
) -> Iterator[tuple[list[int], Link | None, Link | None]]:
    """Yield the indices of rows on the same links, with the link inside a node and the network between nodes.

    The first link is None if the GPU is unknown; the second is None if the ranks share a node or the network is not
    stated. The network of an NVLink domain is that of all its nodes.

    Raises:
        SpecError: the name of a link is unknown, or a cell lacks it; the message names row and column.
    """
    text = [columns.get(name, [""] * len(measured)) for name in ("gpu", "interconnect", "link", "network")]
    near, far = measured.local > 1, measured.ranks > measured.local
    alike: dict[tuple[str, str, str, str, bool, bool, float], list[int]] = {}
    for row, key in enumerate(zip(*text, near.tolist(), far.tolist(), nodes_joined.tolist(), strict=True)):
        alike.setdefault(key, []).append(row)
    for key, members in alike.items():
        try:
            intra, inter = _links(*key[:-1])
        except SpecError as error:
            where = _cell(path, members[0], error.field)
            raise SpecError(where, error.problem, error.remedy) from None
        nodes = key[-1]
        if inter is not None and nodes > 1:
            rate, nics = inter.bandwidth_bytes_per_s * nodes, round(inter.nics * nodes)
            inter = replace(inter, bandwidth_bytes_per_s=rate, nics=nics)
        yield members, intra, inter


def _links(
    gpu_name: str, words: str, link: str, network: str, shares_node: bool, spans_nodes: bool
) -> tuple[Link | None, Link | None]:
    """Return the link inside the node and the network between nodes.

    The first is None if the GPU is unknown; the second is None if the ranks share a node or the network is not stated.

    Raises:
        SpecError: the name of a link is unknown, or a cell lacks it; the error's field is the column.
    """
    inside, _, between = words.partition(";")
    if link and not gpu_name:
        intra = _named(link, "link")
        return intra, _named(network, "network") if network else None
    gpu = _gpu(gpu_name)
    if gpu is None:
        return None, None
    between = between or words
    known = any(word in words.lower() for word in ("nv", "pcie", "not stated")) or names_network(words)
    if words and not known and not link:
        raise SpecError(
            "interconnect", f"unknown link {words[:60]!r}", "write NVLink, PCIe, InfiniBand, EFA or the like"
        )
    intra = _named(link, "link") if link else intra_link(inside if shares_node else "", gpu)
    if not spans_nodes:
        return intra, None
    if network:
        return intra, _named(network, "network")
    return intra, network_link(between, gpu, NODE_GPUS) if names_network(between) else None


def _named(name: str, field: str) -> Link:
    try:
        return find_link(name)
    except SpecError as error:
        raise SpecError(field, error.problem, error.remedy) from None


def _gpu(name: str) -> Gpu | None:
    text = name.split("(")[0].strip()
    if not text:
        raise SpecError("gpu", "is empty and no link is named", "give gpu, or the name of a link in link")
    try:
        return find_gpu(ASSUMED.get(normalise_product(text).upper(), text))
    except SpecError:
        return None


def run(files: Sequence[Path], rows: Path | None, track: Track = iterate_without_progress) -> str:
    """Predict the rows of tables of collectives, write them to `rows` if it is given, and summarise the errors.

    Args:
        files: measured tables, plain or gzipped.
        rows: CSV to write: the input's columns in their order, plus `predicted_us`, `lower_us`, `upper_us` and
            `reason`. Several inputs share the union of their columns.
        track: shows progress over the files.

    Returns:
        Mean absolute errors by collective, link, GPUs and size class, each beside the error of line rates alone.

    Raises:
        SpecError: a file cannot be read, or a cell has an impossible value.
    """
    tables = [read_collectives(path) for path in track(files, "tables of collectives")]
    if rows is not None:
        csvfile.write_csv(rows, ((t.header, t.cells, (t.seconds, t.lower, t.upper, t.reason)) for t in tables))
    return summary(tables)


def summary(tables: Sequence[CollectivesTable]) -> str:
    """Return the errors over all tables as text."""
    measured = Measurements.concatenate([table.measured for table in tables])
    seconds, lower, upper, bound = (
        np.concatenate([getattr(table, name) for table in tables]) for name in ("seconds", "lower", "upper", "bound")
    )
    link = np.array([name for table in tables for name in table.link])
    shape = np.array([f"{n / g:g}x{g:g}" for n, g in zip(measured.ranks, measured.local, strict=True)])
    size = np.searchsorted([end for _, end in CLASSES], measured.size_bytes, side="right")
    scored = np.isfinite(seconds) & np.isfinite(measured.seconds)
    taken = np.where(scored, measured.seconds, 1.0)
    error, plain = np.abs(seconds / taken - 1), np.abs(bound / taken - 1)
    inside = (lower <= taken) & (taken <= upper)
    titles = "".join(f"{name:>16}" for name, _ in CLASSES)
    lines = [f"{'collective':<15}{'link':<22}{'GPUs':>6}{'rows':>8}{titles}{'in 90 %':>9}"]

    def line(name: str, joined: str, gpus: str, rows: np.ndarray) -> str:
        cells = []
        for index in range(len(CLASSES)):
            of = rows & (size == index)
            cells.append(f"{error[of].mean():.1%} / {plain[of].mean():.1%}" if of.any() else "")
        shown = "".join(f"{text:>16}" for text in cells)
        return f"{name:<15}{joined:<22}{gpus:>6}{rows.sum():>8}{shown}{inside[rows].mean():>9.1%}"

    keys = zip(measured.collective[scored].tolist(), link[scored].tolist(), shape[scored].tolist(), strict=True)
    for name, joined, gpus in sorted(set(keys)):
        lines.append(
            line(name, joined, gpus, scored & (measured.collective == name) & (link == joined) & (shape == gpus))
        )
    if scored.any():
        lines.append(line("all", "", "", scored))
    lines += ["", "Mean absolute error of ours / of the bytes over the line rate alone, by size of the buffer."]
    reasons = [text for table in tables for text in table.reason if text]
    if reasons:
        counts = ", ".join(f"{text} {reasons.count(text)}" for text in REASONS if text in reasons)
        lines.append(f"not predicted: {counts}")
    return "\n".join(lines)
