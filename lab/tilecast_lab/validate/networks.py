"""Pools of rows of measured runs: links inside nodes and networks between them, from the descriptions in tables.

A description is matched word by word; what it leaves open is taken from the usual platform of the GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from tilecast.hardware import Gpu, Link, Pool, find_link
from tilecast.validate.cells import Row, read_integer
from tilecast.validate.reading import find_usual_network

_GENERATION_LINK = {
    "volta": "nvlink2", "ampere": "nvlink3", "hopper": "nvlink4", "blackwell": "nvlink5",
}  # fmt: skip
_GENERATION_BOARD = {"ampere": "nvlink3-board", "hopper": "nvlink4-board"}
"""Link of four GPUs that are wired to each other without a switch, by architecture."""
_GENERATION_BRIDGE = {8.0: "nvlink3-pair", 9.0: "nvlink4-pair"}
"""NVLink bridge by compute capability, for tables that do not state the variant of the GPU."""
_GENERATION_BUS = {
    "pascal": "pcie3", "volta": "pcie3", "turing": "pcie3", "ampere": "pcie4", "ada-lovelace": "pcie4",
    "hopper": "pcie5", "blackwell": "pcie5",
}  # fmt: skip


def pool_of(row: Row, gpu: Gpu, gpus: int) -> Pool:
    """Return the pool of `gpus` GPUs that a row describes."""
    per_node = min(read_integer(row, "gpus_per_node") or 8, gpus)
    return Pool(
        name=gpu.name,
        gpu=gpu,
        gpus_per_node=per_node,
        max_nodes=-(-gpus // per_node),
        intra=intra_link(row.get("interconnect_intra", ""), gpu),
        inter=_between_nodes(row, gpu, per_node),
    )


def _between_nodes(row: Row, gpu: Gpu, per_node: int) -> Link:
    """Return the network of a row, or gRPC if TensorFlow's own ring runs and is slower than the network.

    TensorFlow's MultiWorkerMirroredStrategy chooses that ring from 2.0 to 2.3 (CollectiveCommunication.AUTO); NVIDIA's
    containers run Horovod instead.
    """
    stated = network_link(row.get("interconnect_inter", ""), gpu, per_node)
    is_ring = re.search(r"\btensorflow 2\.[0-3]\b(?!.*(?:ngc|horovod))", row.get("framework", "").lower())
    links = (stated, find_link("grpc")) if is_ring else (stated,)
    return min(links, key=lambda link: link.bandwidth_bytes_per_s * link.efficiency)


def intra_link(text: str, gpu: Gpu) -> Link:
    """Return the link between GPUs of a node that a table's text describes, or the usual one of the GPU."""
    words = text.lower()
    usual = find_link(gpu.intra_link)
    stated = re.search(r"pcie (?:gen ?)?([345])", words)
    generation = gpu.intra_link if usual.kind == "pcie" else _GENERATION_BUS.get(gpu.architecture, "pcie4")
    bus = find_link(f"pcie{stated[1]}" if stated else generation)
    if "pcie" in words and ("nv" not in words or "some hosts" in words):
        return bus
    if "pairs" in words or "bridge" in words:
        bridge = gpu.bridge or _GENERATION_BRIDGE.get(gpu.compute_capability)
        return find_link(bridge) if bridge else bus
    if ("board" in words or "quad" in words) and gpu.architecture in _GENERATION_BOARD:
        return find_link(_GENERATION_BOARD[gpu.architecture])
    if "nvswitch" in words and gpu.architecture == "volta":
        return find_link("nvlink2-switch")
    if "nv" in words and usual.kind != "nvlink":
        return find_link(_GENERATION_LINK.get(gpu.architecture, gpu.intra_link))
    return usual


_FABRICS: tuple[tuple[str, str], ...] = (
    ("pods", "pod-tcp"), ("without cxi", "slingshot-tcp"), ("tcpxo", "gpudirect-tcpxo-8x200"),
    ("a3 mega", "gpudirect-tcpxo-8x200"), ("tcpx", "gpudirect-tcpx-4x200"), ("sockets", "ethernet-10"),
    ("tcp", "ethernet-100"),
    ("slingshot", "slingshot-4x200"), ("efa", "efa-400"), ("roce", "roce-1600"), ("omni-path", "omnipath-4x100"),
    ("edr", "infiniband-edr-4x100"), ("xdr", "infiniband-xdr-8x800"), ("ndr", "infiniband-ndr-8x400"),
    ("hdr", "infiniband-hdr-8x200"), ("ib 200", "infiniband-hdr-8x200"), ("infiniband", "infiniband-hdr-8x200"),
    ("rdma", "infiniband-ndr-8x400"), ("ethernet", "ethernet-100"),
)  # fmt: skip
"""Words that sources use for a network, and the link with its latency and efficiency; the first match is used."""
_NEWER: Mapping[str, str] = {"efa": "efa-3200", "infiniband": "infiniband-ndr-8x400", "roce": "roce-3200"}
"""Link that a word means for nodes with GPUs of the Hopper generation or later."""


def network_link(text: str, gpu: Gpu, per_node: int) -> Link:
    """Return the network that a table's text describes.

    The words give its kind, the figures its rate and number of ports. The nominal rate is ignored for TCP between pods,
    which does not reach it.
    """
    words = _between_gpus(text)
    word, name = next((pair for pair in _FABRICS if pair[0] in words), ("", ""))
    if gpu.architecture in ("hopper", "blackwell"):
        name = _NEWER.get(word, name)
    usual = find_link(find_usual_network(gpu))
    link = find_link(name) if name else usual
    ports, rate = (0, 0.0) if link.kind == "pod-tcp" else _gigabits(words, per_node)
    if not rate:
        # "Ethernet" without a rate may be any cable; the word for a fabric says which one, but not how fast it is.
        return usual if word == "ethernet" or (word == "infiniband" and usual.kind == "infiniband") else link
    if link.kind == "infiniband" and not ports and rate * link.nics == link.bandwidth_bytes_per_s * 8e-9:
        return link  # the stated rate is the rate of one port of this link
    nics = ports or link.nics
    return replace(link, bandwidth_bytes_per_s=rate * 1e9 / 8, nics=nics, gpu_nics=max(1, nics // per_node))


def _between_gpus(text: str) -> str:
    """Return the part of a description that is about the network between GPUs, in lower case.

    Among several adapters this is the fastest of those for computation, or else of those not for storage or management.
    Rates in bytes are dropped, because they describe buses.
    """
    bits = re.sub(r"\d+ ?GB/s", "", text).lower()
    parts = re.split(r"[,;]\s*(?=\d+ ?x|[a-z+]+:)|\s\+\s|\sand\s(?=\d)", bits)
    computing = [part for part in parts if re.match(r"compute\b", part.strip()) or part.endswith(" ew")]
    others = [part for part in parts if not re.match(r"(storage|management)\b", part.strip())]
    return max(computing or others, key=lambda part: _gigabits(part, 1)[1], default="")


def names_network(text: str) -> bool:
    """Return whether a table's words say which network it is."""
    words = _between_gpus(text)
    return "not stated" not in words and (any(word in words for word, _ in _FABRICS) or _gigabits(words, 1)[1] > 0)


_RATES: tuple[tuple[str, Callable[[re.Match[str], int], tuple[int, float]]], ...] = (
    (r"(\d+) ?x ?[^,;]*?(\d+) ?g(?:b|\b)", lambda match, per_node: (int(match[1]), float(match[1]) * float(match[2]))),
    (r"(\d+) ?gb\S* per gpu", lambda match, per_node: (per_node, float(match[1]) * per_node)),
    (r"(\d+) ?gb", lambda match, per_node: (0, float(match[1]))),
)
"""Patterns for the ports of a node (0 if not stated) and their total rate in Gb/s, as sources write them."""


def _gigabits(words: str, per_node: int) -> tuple[int, float]:
    for pattern, rate in _RATES:
        if match := re.search(pattern, words):
            return rate(match, per_node)
    return 0, 0.0
