"""Facts about GPUs and links, read from the TOML files beside this one.

Every number carries its unit in its key and its source in the same file. Loading checks them: an unknown
key, a missing one or an implausible value fails with the file's name.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, field_validator

from tilecast.calibration import Calibration
from tilecast.spec import PRECISIONS, Precision, SpecError
from tilecast.transfer import Transfer

LIMITED: tuple[Precision, ...] = ("tf32", "fp16", "bf16")
"""Precisions whose tensor cores GeForce products hold back where they accumulate in FP32."""


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
    """Share of `peak_flops` that power or clock limits leave under sustained load; 1 where not stated. `attention`, if
    stated, is that of fused attention, which reaches less of the peak and so meets the limit later."""
    intra_link: str
    """Name of the link between GPUs of one node that this product usually has."""
    fp16_accumulate_flops: float = 0.0
    """Peak of its tensor cores in FP16 that accumulate in FP16 too, where FP32 accumulation is held back to less; 0
    where both are alike."""
    bridge: str = ""
    """Name of the link that NVLink bridges make between some of them; empty where the product takes none."""
    aliases: tuple[str, ...] = ()
    """Product strings as drivers, labels and tables write them, normalised by `normalise`."""
    mig: str = ""
    """The MIG profile of a slice; empty for a whole GPU. A job runs on one slice: slices do not reach each other."""
    share: float = 1.0
    """Of the whole GPU, what a slice takes."""
    instances: int = 1
    """How many such slices fit on the whole GPU."""

    def peak(self, precision: str) -> float:
        """Dense peak in FLOP/s.

        Raises:
            SpecError: the GPU has no such precision.
        """
        if precision not in self.peak_flops:
            have = ", ".join(self.peak_flops)
            raise SpecError("precision", f"{self.name} has no {precision} units", f"use one of {have}")
        return self.peak_flops[precision]

    def unlimited(self) -> Gpu:
        """The GPU without the limit on FP32 accumulation: what its tensor cores are fed for."""
        if not self.fp16_accumulate_flops:
            return self
        factor = self.fp16_accumulate_flops / self.peak("fp16")
        rates = {name: rate * (factor if name in LIMITED else 1.0) for name, rate in self.peak_flops.items()}
        return replace(self, peak_flops=rates)

    def supports(self, precision: str) -> bool:
        return precision in self.peak_flops


@dataclass(frozen=True, slots=True)
class MigProfile:
    """A slice that a GPU can be cut into (Multi-Instance GPU)."""

    name: str
    sms: int
    memory_bytes: float
    compute_share: float
    """Of the GPU's compute slices."""
    memory_share: float
    """Of its memory slices, and so of bandwidth and L2."""
    instances: int
    """How many fit on one GPU."""

    @property
    def share(self) -> float:
        """Of the GPU, what nobody else can use: the larger of both shares."""
        return max(self.compute_share, self.memory_share)

    def slice(self, gpu: Gpu) -> Gpu:
        """The slice as a GPU of its own. Clocks are those of the whole; rates follow the multiprocessors and the memory
        slices."""
        sms = self.sms / gpu.sm_count
        return replace(
            gpu,
            name=f"{gpu.name}{_MIG}{self.name}",
            product=f"{gpu.product} MIG {self.name}",
            sm_count=self.sms,
            memory_bytes=self.memory_bytes,
            memory_bandwidth_bytes_per_s=gpu.memory_bandwidth_bytes_per_s * self.memory_share,
            l2_bytes=gpu.l2_bytes * self.memory_share,
            l2_bandwidth_bytes_per_s=gpu.l2_bandwidth_bytes_per_s * self.memory_share,
            tdp_w=gpu.tdp_w * self.share,
            peak_flops={name: rate * sms for name, rate in gpu.peak_flops.items()},
            fp16_accumulate_flops=gpu.fp16_accumulate_flops * sms,
            aliases=(),
            mig=self.name,
            share=self.share,
            instances=self.instances,
        )


_MIG = "-mig-"
"""Between the GPU and the profile in a slice's name, as in the product strings of GPU Feature Discovery."""

PROTOCOLS = ("ll", "ll128", "simple")
"""NCCL's ways to move bytes: with a flag in every 8 bytes, in every 128 bytes, or in plain chunks."""
MESSAGE = "message"
"""How a message from one rank to another moves besides; where a link does not state it, it is as a collective."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """What a protocol costs on a link: once, for each hop, and its share of the rate that bulk data reach."""

    start_s: float
    hop_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier of a network: so many nodes share a switch whose uplinks carry 1/oversubscription of their rate."""

    nodes: int
    oversubscription: float


@dataclass(frozen=True, slots=True)
class Link:
    """A way between GPUs. Inside a node the bandwidth is one direction of one GPU; between nodes
    (`per_node`) it is one direction of all network interfaces of one node together."""

    name: str
    kind: str
    bandwidth_bytes_per_s: float
    efficiency: float
    """Share of the bandwidth that bulk data reach."""
    protocols: Mapping[str, Protocol]
    """By name, those of `PROTOCOLS` and `MESSAGE` that NCCL uses on the link."""
    peer_s: float
    """Cost of each further peer that a rank exchanges messages with."""
    own_share: float = 0.0
    """Cost of the part that stays on the rank (1/n of the buffer) against as many bytes on the link."""
    per_node: bool = False
    nics: int = 1
    """Network interfaces of one node."""
    gpu_nics: int = 1
    """How many of them one GPU can drive."""
    switched: bool = True
    """Whether all pairs have the full bandwidth at once (NVSwitch), or share a bus (PCIe)."""
    wired: tuple[tuple[float, float], ...] = ()
    """Where GPUs are wired to each other without a switch: how many of them, and the share of the bandwidth that so
    many have among themselves, in rising order. Between the points the share is interpolated."""
    domain: int = 0
    """GPUs that the link joins, where these are not just those of a node: fewer (NVLink bridges), or those of several
    nodes (NVLink domains of a rack); 0 means those of a node. Of a bus, the GPUs of each island that it joins."""
    beyond: Link | None = None
    """The link between such domains."""
    reduction_bytes_per_s: float = 0.0
    """Rate of each GPU at an all-reduce in the switch (NVLS); 0 where there is none."""
    reduction_start_s: float = 0.0
    tiers: tuple[Tier, ...] = ()
    spread: float = 0.0
    """Half-width of the 90 % range of a time on the link, as a logarithm."""


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
    layers: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where each fact came from: override, the vendor of a label, instance type, default. Pools of one kind are equal
    whoever told it."""
    free_gpus: int | None = None
    """GPUs that nothing uses now; None where that is not known. It decides no ranking."""
    calibration: Calibration = field(default_factory=Calibration)
    """What the cluster's own runs teach about forecasts on this pool."""
    own: Transfer = field(default_factory=Transfer)
    """What the job's own runs, here or elsewhere, teach about its forecasts."""
    usual_gpus_per_node: int = 0
    """GPUs of a whole node, where the pool was said to have a part of one; 0 where its nodes are what they are."""

    @property
    def is_part(self) -> bool:
        """Whether the pool is a part of one node."""
        return self.max_nodes == 1 and self.usual_gpus_per_node > self.gpus_per_node

    @property
    def max_gpus(self) -> int:
        return self.gpus_per_node * self.max_nodes

    @property
    def domain(self) -> int:
        """GPUs that the link inside nodes joins: those of a node, or of the whole nodes that share an NVLink domain."""
        wide = self.intra.domain if self.intra.switched and self.intra.beyond is None else 0
        return max(wide // self.gpus_per_node, 1) * self.gpus_per_node


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


FileT = TypeVar("FileT", bound=_Facts)
NAME = r"^[a-z0-9][a-z0-9.-]{0,62}$"


class GpuFile(_Facts):
    """The schema of `gpus/*.toml`, and of a GPU file that a user brings."""

    name: str = Field(pattern=NAME)
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
    fp16_accumulate_tflops: PositiveFloat | None = None
    bridge: str = ""
    aliases: tuple[str, ...] = ()
    peak_tflops: dict[Precision, PositiveFloat]
    sustained_ratio: dict[Precision | Literal["attention"], float] = {}
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
            sustained_ratio={**dict.fromkeys(PRECISIONS, 1.0), **dict[str, float](self.sustained_ratio.items())},
            intra_link=self.intra_link,
            fp16_accumulate_flops=(self.fp16_accumulate_tflops or 0.0) * 1e12,
            bridge=self.bridge,
            aliases=tuple(normalise(alias) for alias in (self.name, self.product, *self.aliases)),
        )


class MigProfileFile(_Facts):
    """One profile of `mig.toml`."""

    name: str = Field(pattern=r"^[1-9]g\.[0-9]+gb$")
    compute: PositiveInt
    memory: PositiveInt
    sms: PositiveInt
    memory_gib: PositiveFloat
    instances: PositiveInt


class MigGpuFile(_Facts):
    """The GPUs that can be cut alike."""

    names: tuple[str, ...]
    compute_slices: PositiveInt
    memory_slices: PositiveInt
    source: str
    profiles: tuple[MigProfileFile, ...]


class MigFile(_Facts):
    """The schema of `mig.toml`."""

    gpu: tuple[MigGpuFile, ...]


class ProtocolFile(_Facts):
    """One protocol of a table of constants."""

    start_us: PositiveFloat
    hop_us: PositiveFloat
    share: PositiveFloat


class ConstantsFile(_Facts):
    """Constants of one type of link: a table of `protocols.toml`, or a part of a link file."""

    ll: ProtocolFile | None = None
    ll128: ProtocolFile | None = None
    simple: ProtocolFile
    message: ProtocolFile | None = None
    peer_us: PositiveFloat
    own_share: float = Field(ge=0, le=1, default=0.0)
    reduction_start_us: float = Field(ge=0, default=0.0)
    spread: float = Field(ge=0)
    source: str


class TierFile(_Facts):
    """A tier of a network."""

    nodes: PositiveInt
    oversubscription: float = Field(ge=1)


class LinkFile(_Facts):
    """The schema of `links/*.toml`, and of a link file that a user brings."""

    name: str = Field(pattern=NAME)
    kind: str
    bandwidth_gb_per_s: PositiveFloat
    efficiency: float = Field(gt=0, le=1)
    protocols: str | ConstantsFile
    """Name of a table of `protocols.toml`, or such a table."""
    per_node: bool = False
    nics: PositiveInt = 1
    gpu_nics: PositiveInt = 1
    switched: bool = True
    wired: tuple[tuple[PositiveFloat, Annotated[float, Field(gt=0, le=1)]], ...] = ()
    domain: int = Field(ge=0, default=0)
    beyond: str | None = None
    reduction_gb_per_s: float = Field(ge=0, default=0.0)
    tiers: tuple[TierFile, ...] = ()
    sources: dict[str, str]

    @field_validator("wired")
    @classmethod
    def _unique(cls, wired: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        if len({count for count, _ in wired}) < len(wired):
            raise ValueError("a number of GPUs appears twice")
        return wired

    def link(self, known: Mapping[str, Link]) -> Link:
        """The same facts in SI units; the link beyond a domain is among those that are known.

        Raises:
            SpecError: the table of protocols or the link beyond the domain is unknown, or that link is this one or
                has another beyond itself.
        """
        if self.beyond and (self.beyond == self.name or (self.beyond in known and known[self.beyond].beyond)):
            raise _chained(self)
        beyond = _named(known, self.beyond, f"{self.name}: beyond") if self.beyond else None
        constants = self.protocols
        if isinstance(constants, str):
            constants = _named(_protocols(), constants, f"{self.name}: protocols")
        found = {name: one for name in (*PROTOCOLS, MESSAGE) if (one := getattr(constants, name))}
        for name, one in found.items():
            if one.share * self.efficiency > 1:
                problem = f"{one.share:g} of {self.efficiency:g} of the bandwidth is more than all of it"
                raise SpecError(f"{self.name}: protocols.{name}.share", problem, "lower it, or the efficiency")
        return Link(
            name=self.name,
            kind=self.kind,
            bandwidth_bytes_per_s=self.bandwidth_gb_per_s * 1e9,
            efficiency=self.efficiency,
            protocols={
                name: Protocol(one.start_us * 1e-6, one.hop_us * 1e-6, one.share) for name, one in found.items()
            },
            peer_s=constants.peer_us * 1e-6,
            own_share=constants.own_share,
            per_node=self.per_node,
            nics=self.nics,
            gpu_nics=self.gpu_nics,
            switched=self.switched,
            wired=tuple(sorted(self.wired)),
            domain=self.domain,
            beyond=replace(beyond, domain=self.domain) if beyond else None,
            reduction_bytes_per_s=self.reduction_gb_per_s * 1e9,
            reduction_start_s=constants.reduction_start_us * 1e-6,
            tiers=tuple(Tier(tier.nodes, tier.oversubscription) for tier in self.tiers),
            spread=constants.spread,
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


def links() -> Mapping[str, Link]:
    """Every link by name: those that ship with Tilecast, and the TOML files of the folder that `TILECAST_LINKS`
    names, which win.

    Raises:
        SpecError: the folder or a file in it cannot be read, or breaks the `LinkFile` schema.
    """
    return _links(os.environ.get("TILECAST_LINKS", ""))


@cache
def _link_files(folder: str) -> Mapping[str, LinkFile]:
    if folder and not Path(folder).is_dir():
        raise SpecError("TILECAST_LINKS", f"{folder} is no folder", "name the folder that holds your link files")
    mine = sorted(Path(folder).glob("*.toml")) if folder else []
    return {item.name: item for path in [*_toml_files("links"), *mine] for item in [_read(path, LinkFile)]}


@cache
def _links(folder: str) -> Mapping[str, Link]:
    facts = _link_files(folder)
    plain = {name: item.link({}) for name, item in facts.items() if not item.beyond}
    joined = [item for item in facts.values() if item.beyond]
    for item in joined:
        if item.beyond in facts and item.beyond not in plain:
            raise _chained(item)
    return dict(sorted((plain | {item.name: item.link(plain) for item in joined}).items()))


def _chained(item: LinkFile) -> SpecError:
    problem = f"{item.beyond!r} is the link itself or has another beyond it"
    return SpecError(f"{item.name}: beyond", problem, "name a link that has none beyond it")


def gpu_facts(name: str) -> GpuFile:
    """The shipped file of a GPU, sources among it; of a slice that of the whole.

    Raises:
        SpecError: no shipped GPU answers to the name.
    """
    return _read(files("tilecast.hardware").joinpath("gpus", f"{find_gpu(name).name.partition(_MIG)[0]}.toml"), GpuFile)


def link_facts(name: str) -> LinkFile:
    """The file of a link, sources among it, shipped or from the folder that `TILECAST_LINKS` names.

    Raises:
        SpecError: there is no such link.
    """
    return _named(_link_files(os.environ.get("TILECAST_LINKS", "")), find_link(name).name, "link")


def load_link(path: Path | Traversable) -> Link:
    """A link from a TOML file of the `LinkFile` schema.

    Raises:
        SpecError: the file cannot be read, is not TOML, or breaks the schema; the message names the key.
    """
    return _read(path, LinkFile).link(links())


@cache
def digest() -> str:
    """SHA-256 of every file of facts beside this one: GPUs, links, protocols, instance types."""
    root = files("tilecast.hardware")
    found = [
        root.joinpath("protocols.toml"),
        root.joinpath("mig.toml"),
        *(item for name in ("gpus", "links", "nodes") for item in _toml_files(name)),
    ]
    return hashlib.sha256(b"".join(item.read_bytes() for item in found)).hexdigest()


@cache
def _mig() -> Mapping[str, tuple[MigProfile, ...]]:
    table = _read(files("tilecast.hardware").joinpath("mig.toml"), MigFile)
    return {
        name: tuple(
            MigProfile(
                row.name,
                row.sms,
                row.memory_gib * 2**30,
                row.compute / item.compute_slices,
                row.memory / item.memory_slices,
                row.instances,
            )
            for row in item.profiles
        )
        for item in table.gpu
        for name in item.names
    }


def mig_profiles(gpu: Gpu) -> tuple[MigProfile, ...]:
    """The slices that a whole GPU can be cut into, smallest first; none where it cannot, or no facts are at hand."""
    return () if gpu.mig else _mig().get(gpu.name, ())


def find_slice(gpu: Gpu, profile: str) -> Gpu:
    """The slice of that profile, for instance `1g.10gb`.

    Raises:
        SpecError: the GPU has no such profile.
    """
    found = {normalise(item.name): item for item in mig_profiles(gpu)}
    if normalise(profile) not in found:
        known = ", ".join(item.name for item in found.values())
        raise SpecError("mig", f"{gpu.name} has no profile {profile!r}", f"use one of {known}" if known else "drop it")
    return found[normalise(profile)].slice(gpu)


def find_gpu(name: str) -> Gpu:
    """The GPU of that name or product string; of `GPU-MIG-PROFILE` the slice.

    Raises:
        SpecError: no shipped GPU answers to it; the message offers the nearest names.
    """
    whole, cut, profile = name.lower().partition(_MIG)
    if cut:
        return find_slice(find_gpu(whole), profile)
    key = normalise(name)
    table = gpus()
    for gpu in table.values():
        if key in gpu.aliases:
            return gpu
    near = get_close_matches(key, [alias for gpu in table.values() for alias in gpu.aliases], n=1, cutoff=_CLOSE)
    meant = next((gpu.name for gpu in table.values() if near and near[0] in gpu.aliases), None)
    hint = f"did you mean {meant}?" if meant else f"known are NVIDIA's {', '.join(table)}"
    raise SpecError("gpu", f"unknown GPU {name!r}", hint)


_CLOSE = 0.7
"""How alike two names have to be, by difflib's ratio: 4090 is an RTX 4090, an MI300X is no B300."""


def find_link(name: str) -> Link:
    """The link of that name.

    Raises:
        SpecError: there is no such link.
    """
    return _named(links(), name, "link")


NamedT = TypeVar("NamedT")


def _named(table: Mapping[str, NamedT], name: str, field: str) -> NamedT:
    if name not in table:
        raise SpecError(field, f"unknown {field.split()[-1]} {name!r}", f"known: {', '.join(table)}")
    return table[name]


@cache
def _protocols() -> Mapping[str, ConstantsFile]:
    table = tomllib.loads(files("tilecast.hardware").joinpath("protocols.toml").read_text(encoding="utf-8"))
    return {name: ConstantsFile.model_validate(row) for name, row in table.items()}


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
            f"{path.name}: {where}", first["msg"], f"see `tilecast.hardware.{schema.__name__}` for the schema"
        ) from None
