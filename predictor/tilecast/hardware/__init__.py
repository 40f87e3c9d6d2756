"""Facts about GPUs and links, read from the TOML files beside this one.

Every number carries its unit in its key and its source in the same file. Loading checks them: an unknown
key, a missing one or an implausible value fails with the file's name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from tilecast.spec import PRECISIONS, Precision, SpecError


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model. Rates are dense, per second, and those of the data sheet unless named sustained."""

    name: str
    product: str
    architecture: str
    compute_capability: float
    sm_count: int
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    l2_bytes: float
    l2_bandwidth_bytes_per_s: float
    boost_clock_hz: float
    tdp_w: float
    peak_flops: Mapping[str, float]
    """FLOP/s by precision; a precision that the GPU cannot run is absent."""
    sustained_ratio: Mapping[str, float]
    """Share of `peak_flops` that power or clock limits leave under sustained load; 1 where not stated."""
    intra_link: str
    """Name of the link between GPUs of one node that this product usually has."""
    aliases: tuple[str, ...] = ()
    """Product strings as drivers, labels and tables write them, normalised by `normalise`."""

    def peak(self, precision: str) -> float:
        """Dense peak in FLOP/s.

        Raises:
            SpecError: the GPU has no such precision.
        """
        if precision not in self.peak_flops:
            have = ", ".join(self.peak_flops)
            raise SpecError("precision", f"{self.name} has no {precision} units", f"use one of {have}")
        return self.peak_flops[precision]

    def supports(self, precision: str) -> bool:
        return precision in self.peak_flops


@dataclass(frozen=True, slots=True)
class Link:
    """A way between GPUs. Inside a node the bandwidth is one direction of one GPU; between nodes
    (`per_node`) it is one direction of all network interfaces of one node together.

    A message costs `launch_s`, `latency_s` for each hop, and its bytes on the wire at the better of two
    protocols: the bulk protocol at `efficiency` of the bandwidth after `ramp_s`, or the low-latency
    protocol at `low_latency_ratio` of that rate at once (NCCL's Simple and LL/LL128).
    """

    name: str
    kind: str
    launch_s: float
    latency_s: float
    bandwidth_bytes_per_s: float
    efficiency: float
    low_latency_ratio: float
    ramp_s: float
    per_node: bool = False
    switched: bool = True
    """Whether all pairs have the full bandwidth at once (NVSwitch), or share a bus (PCIe)."""
    reduction_bytes_per_s: float = 0.0
    """Rate of an all-reduce in the switch (NVLS), in bytes of the buffer per second; 0 where there is none."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Nodes of one kind that a job may use: what is priced."""

    name: str
    gpu: Gpu
    gpus_per_node: int
    max_nodes: int
    intra: Link
    inter: Link
    node_type: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, str], ...] = ()
    price_per_gpu_hour: float | None = None
    currency: str = "USD"
    layer: str = "inline"
    """Where the GPU facts came from: override, label, instance type, inline."""

    @property
    def max_gpus(self) -> int:
        return self.gpus_per_node * self.max_nodes


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


FileT = TypeVar("FileT", bound=_Facts)


class GpuFile(_Facts):
    """The schema of `gpus/*.toml`, and of a GPU file that a user brings."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$")
    product: str
    architecture: str
    compute_capability: PositiveFloat
    sm_count: PositiveInt
    memory_gib: PositiveFloat
    memory_bandwidth_gb_per_s: PositiveFloat
    l2_mib: PositiveFloat
    l2_bandwidth_gb_per_s: PositiveFloat
    boost_clock_mhz: PositiveFloat
    tdp_w: PositiveFloat
    intra_link: str
    aliases: tuple[str, ...] = ()
    peak_tflops: dict[Precision, PositiveFloat]
    sustained_ratio: dict[Precision, float] = {}
    sources: dict[str, str]

    def gpu(self) -> Gpu:
        """The same facts in SI units."""
        return Gpu(
            name=self.name,
            product=self.product,
            architecture=self.architecture,
            compute_capability=self.compute_capability,
            sm_count=self.sm_count,
            memory_bytes=self.memory_gib * 2**30,
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_gb_per_s * 1e9,
            l2_bytes=self.l2_mib * 2**20,
            l2_bandwidth_bytes_per_s=self.l2_bandwidth_gb_per_s * 1e9,
            boost_clock_hz=self.boost_clock_mhz * 1e6,
            tdp_w=self.tdp_w,
            peak_flops={name: self.peak_tflops[name] * 1e12 for name in PRECISIONS if name in self.peak_tflops},
            sustained_ratio={name: self.sustained_ratio.get(name, 1.0) for name in PRECISIONS},
            intra_link=self.intra_link,
            aliases=tuple(normalise(alias) for alias in (self.name, self.product, *self.aliases)),
        )


class LinkFile(_Facts):
    """The schema of `links/*.toml`."""

    name: str
    kind: str
    launch_us: PositiveFloat
    latency_us: PositiveFloat
    bandwidth_gb_per_s: PositiveFloat
    efficiency: float = Field(gt=0, le=1)
    low_latency_ratio: float = Field(gt=0, le=1)
    ramp_us: float = Field(ge=0)
    per_node: bool = False
    switched: bool = True
    reduction_gb_per_s: float = Field(ge=0, default=0.0)
    sources: dict[str, str]

    def link(self) -> Link:
        """The same facts in SI units."""
        return Link(
            name=self.name,
            kind=self.kind,
            launch_s=self.launch_us * 1e-6,
            latency_s=self.latency_us * 1e-6,
            bandwidth_bytes_per_s=self.bandwidth_gb_per_s * 1e9,
            efficiency=self.efficiency,
            low_latency_ratio=self.low_latency_ratio,
            ramp_s=self.ramp_us * 1e-6,
            per_node=self.per_node,
            switched=self.switched,
            reduction_bytes_per_s=self.reduction_gb_per_s * 1e9,
        )


def normalise(product: str) -> str:
    """A product string without the spelling differences of drivers, labels and tables.

    >>> normalise("NVIDIA A100-SXM4-80GB") == normalise("nvidia-a100_sxm4_80gb")
    True
    """
    text = "".join(ch if ch.isalnum() else "-" for ch in product.lower())
    words = [word for word in text.split("-") if word not in ("", "nvidia", "tesla")]
    return "-".join(words)


def load_gpu(path: Path | Traversable) -> Gpu:
    """A GPU from a TOML file of the `GpuFile` schema.

    Raises:
        SpecError: the file cannot be read, is not TOML, or breaks the schema; the message names the key.
    """
    return _read(path, GpuFile).gpu()


@cache
def gpus() -> Mapping[str, Gpu]:
    """Every GPU that ships with Tilecast, by name."""
    found = [load_gpu(path) for path in _toml_files("gpus")]
    return {gpu.name: gpu for gpu in found}


@cache
def links() -> Mapping[str, Link]:
    """Every link that ships with Tilecast, by name."""
    found = [_read(path, LinkFile).link() for path in _toml_files("links")]
    return {link.name: link for link in found}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name or product string.

    Raises:
        SpecError: no shipped GPU answers to it; the message offers the nearest names.
    """
    key = normalise(name)
    table = gpus()
    for gpu in table.values():
        if key in gpu.aliases:
            return gpu
    near = get_close_matches(key, [alias for gpu in table.values() for alias in gpu.aliases], n=1)
    meant = next((gpu.name for gpu in table.values() if near and near[0] in gpu.aliases), None)
    hint = f"did you mean {meant}?" if meant else f"known: {', '.join(table)}"
    raise SpecError("gpu", f"unknown GPU {name!r}", hint)


def find_link(name: str) -> Link:
    """The link of that name.

    Raises:
        SpecError: there is no such link.
    """
    if name not in links():
        raise SpecError("link", f"unknown link {name!r}", f"known: {', '.join(links())}")
    return links()[name]


def _toml_files(folder: str) -> list[Traversable]:
    entries = files("tilecast.hardware").joinpath(folder).iterdir()
    return sorted((entry for entry in entries if entry.name.endswith(".toml")), key=lambda entry: entry.name)


def _read(path: Path | Traversable, schema: type[FileT]) -> FileT:
    try:
        return schema.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise SpecError(str(path), "cannot be read", str(error.strerror or error)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(path.name, "is not TOML", str(error)) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SpecError(
            f"{path.name}: {where}", first["msg"], "see `tilecast.hardware.GpuFile` for the schema"
        ) from None
