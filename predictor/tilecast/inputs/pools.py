"""Read pools from a list of GPUs, from Node objects in a file or in memory, or from a cluster through kubectl."""

from __future__ import annotations

import json
import subprocess
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING

from tilecast.hardware import Pool
from tilecast.inputs.gpu_list import ASSUMED, STATED, describe_short_names, parse_gpu_list, with_named_links
from tilecast.inputs.reading import InputWarning, read_text
from tilecast.learning import calibration
from tilecast.spec import SpecError

if TYPE_CHECKING:
    from tilecast.nodes import NodesReport, PublishedDevice


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Options that say where a job may run. At least one of `nodes`, `gpus` and `context` must be set."""

    nodes: str | None = None
    """File of Nodes, GPUPools and ResourceSlices, or "-". A value that begins with a brace is their text."""
    gpus: str | None = None
    """GPU:N,… as `gpu_list` parses it, for instance "h100-sxm:16,p4d.24xlarge:2"."""
    context: str | None = None
    """kubectl context."""
    calibration: str | None = None
    """File of corrections for every pool."""
    link: str | None = None
    """Names of links in or between the nodes of every pool, separated by commas."""

    @classmethod
    def from_attributes(cls, values: object) -> PoolOptions:
        """Return the options from the attributes of a parsed command line. Other attributes are ignored."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in vars(values).items() if name in known})

    @classmethod
    def from_arguments(
        cls, nodes: object, gpus: object, context: str | None, calibration: str | None, link: str | None = None
    ) -> PoolOptions:
        """Return the options from arguments of the Python API.

        Args:
            nodes: a path, or Node objects as dictionaries.
            gpus: a text as for `--gpus`, or a mapping from a GPU's name to its count.
            context: a kubectl context.
            calibration: path of a file of corrections.
            link: names of links, as for `--link`.

        Raises:
            SpecError: more than one of `nodes`, `gpus` and `context` is set.
        """
        several = [
            name for name, value in (("gpus", gpus), ("nodes", nodes), ("context", context)) if value is not None
        ]
        if len(several) > 1:
            raise SpecError(several[0], f"{several[1]} is given too", "give one of gpus, nodes and context")
        if isinstance(gpus, Mapping):
            gpus = ",".join(f"{name}:{count}" for name, count in gpus.items())
        if isinstance(nodes, Mapping):
            nodes = json.dumps(dict(nodes))
        elif isinstance(nodes, Sequence) and not isinstance(nodes, str):
            nodes = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(nodes)})
        elif nodes is not None:
            nodes = str(nodes)
        return cls(nodes, None if gpus is None else str(gpus), context, calibration, link)


def read_pools(options: PoolOptions) -> Sequence[Pool]:
    """Return the pools that the options describe. Warn about nodes that are in no pool.

    Raises:
        SpecError: the options describe no pools, or the input cannot be read or contains no GPU.
    """
    path, links = options.calibration, options.link.split(",") if options.link else []
    table = _read_corrections(path) if path else None
    if options.gpus:
        pools = parse_gpu_list(options.gpus, links)
        return pools if table is None else [replace(pool, calibration=table) for pool in pools]
    report = read_nodes_report(options)
    if table is not None:
        report = report.with_calibration(table)
    for item in report.left_out:
        amount = f"{len(item.nodes)} nodes" if len(item.nodes) > 1 else f"node {item.nodes[0]}"
        text = f"left out {amount}: {item.message}; {item.remedy}"
        warnings.warn(text, InputWarning, stacklevel=2)
    usable = report.require_pools()
    return [with_named_links(pool, links, "--link") for pool in usable] if links else usable


def _read_corrections(file: str) -> calibration.Calibration:
    from tilecast.api import calibration as calibration_file

    return calibration_file.parse_calibration(read_text(file), file)


def read_nodes_report(options: PoolOptions) -> NodesReport:
    """Return the pools of `--nodes` or `--context` with their usable nodes, and the nodes left out. Results are cached.

    Raises:
        SpecError: neither option is set, or the nodes cannot be read.
    """
    return _read_cached_nodes_report(options.context, options.nodes)


@cache
def _read_cached_nodes_report(context: str | None, file: str | None) -> NodesReport:
    from tilecast import nodes
    from tilecast.api import calibration as calibration_file

    lists = nodes.parse_objects(*_read_cached_cluster_text(context, file))
    report = nodes.discover_pools(*lists, usable_only=True)
    seen = calibration_file.read_runs(lists[1], report.pools)
    if seen:
        return report.with_calibration(calibration.fit_calibration([item.run for item in seen]))
    return report.with_calibration(calibration_file.read_corrections(lists[1], report.pools))


def clear_cached_nodes() -> None:
    """Clear the cached nodes, so that the next call reads them again."""
    _read_cached_nodes_report.cache_clear()
    _read_cached_cluster_text.cache_clear()


def list_pool_notes(options: PoolOptions, pools: Sequence[Pool]) -> tuple[str, ...]:
    """Return sentences for the user: assumptions about the pools, and remarks about their nodes."""
    if options.gpus:
        assumed = [pool for pool in pools if ASSUMED in pool.layers.values()]
        shapes = "; ".join(map(describe_nodes, assumed))
        names = describe_short_names(options.gpus)
        nodes = f"Assumed of --gpus: {shapes}. Give --nodes FILE for nodes of your own." if assumed else ""
        return tuple(note for note in (names, nodes) if note)
    guessed = [pool for pool in pools if pool.layers.get("interNode") == "default" and pool.max_nodes > 1]
    notes = [
        f"Assumed: {pool.inter.name} between nodes of {pool.name}, for neither a label, an instance type nor a GPUPool "
        "names their network."
        for pool in guessed
    ]
    remarks: dict[str, list[str]] = {}
    for item in read_nodes_report(options).entries:
        for remark in item.remarks:
            remarks.setdefault(remark, []).append(item.pool.name)
    return (*notes, *(f"{', '.join(names)}: {remark}." for remark, names in remarks.items()))


def describe_nodes(pool: Pool) -> str:
    """Return a phrase that describes a pool's nodes and names the links that were assumed for them."""
    count = f"{pool.max_nodes} nodes" if pool.max_nodes > 1 else "1 node"
    wide = min(pool.domain, pool.max_gpus)
    inside = [f"{pool.intra.name} {f'over {wide} GPUs' if wide > pool.gpus_per_node else 'inside'}"]
    several = pool.max_gpus > pool.gpus_per_node
    between = [f"{pool.inter.name} {'beyond' if wide > pool.gpus_per_node else 'between'}"] * several
    is_stated = pool.layers.get("interNode") == STATED
    is_priced = pool.node_type and pool.price_per_gpu_hour is not None and not is_stated
    typed = [f"priced as {pool.node_type}"] if is_priced else []
    links = [*inside * (pool.layers.get("intraNode") != STATED), *between * (not is_stated)]
    reached = [] if pool.gpu.mig else links
    spare = f" and one of {pool.spare_gpus}" if pool.spare_gpus else ""
    return ", ".join([f"{pool.name} {count} of {pool.gpus_per_node}{spare}", *reached, *typed])


def pools_by_node(options: PoolOptions) -> dict[str, str]:
    """Return the pool's name for each node's name. With `--gpus` there are no nodes, and the mapping is empty."""
    if options.gpus:
        return {}
    return {node: item.pool.name for item in read_nodes_report(options).entries for node in item.members}


def read_node_labels(options: PoolOptions) -> list[Mapping[str, str]]:
    """Return the labels of each node that has GPUs. With `--gpus` there are no nodes, and the list is empty."""
    if options.gpus:
        return []
    from tilecast import nodes

    in_pools = pools_by_node(options)
    everyone = map(nodes.read_node, nodes.parse_objects(*_read_cached_cluster_text(options.context, options.nodes))[0])
    return [node.labels for node in everyone if node.gpus or node.other_devices or node.name in in_pools]


def read_devices(options: PoolOptions) -> Mapping[str, Sequence[PublishedDevice]] | None:
    """Return the devices that ResourceSlices publish, by pool name. With `--gpus`, return None."""
    return None if options.gpus else read_nodes_report(options).devices


@cache
def _read_cached_cluster_text(context: str | None, file: str | None) -> tuple[str, str]:
    """Return the text of Node, GPUPool and ResourceSlice objects, and the name of the text's source for errors.

    The result is cached, because standard input can be read only once.

    Raises:
        SpecError: neither a context nor a file is given, or reading it fails.
    """
    if context:
        return _get_nodes_with_kubectl(context), f"context {context}"
    if file and file.startswith("{"):
        return file, "nodes"
    if file:
        return read_text(file), file
    raise SpecError("--nodes", "no pools are given", "give --nodes FILE, --gpus GPU:N,… or --context NAME")


def _get_nodes_with_kubectl(context: str) -> str:
    remedy, kinds = "check the context, or pipe nodes into --nodes -", "nodes,gpupools.tilecast.dev"
    try:
        return run_kubectl(context, "get", f"{kinds},resourceslices.resource.k8s.io", "-o", "json", remedy=remedy)
    except SpecError as error:
        # Clusters before Kubernetes 1.34 may not serve ResourceSlices.
        if "resource type" not in error.problem or "resourceslices" not in error.problem:
            raise
        return run_kubectl(context, "get", kinds, "-o", "json", remedy=remedy)


def run_kubectl(context: str | None, *arguments: str, remedy: str) -> str:
    """Run kubectl and return its standard output. If `context` is None, kubectl uses its current context.

    Raises:
        SpecError: kubectl cannot be started, or fails. On failure, the error suggests `remedy`.
    """
    command = ["kubectl", *(["--context", context] if context else []), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    except OSError as error:
        raise SpecError("--context", "kubectl cannot be run", str(error.strerror or error)) from None
    if done.returncode:
        problem = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit status {done.returncode}"
        raise SpecError("--context", f"kubectl failed: {problem}", remedy)
    return done.stdout
