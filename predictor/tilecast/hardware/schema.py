"""Schemas of the TOML files of GPUs, links and MIG profiles, and their conversion to the records of `products`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, field_validator

from tilecast import shipped
from tilecast.hardware.products import MESSAGE, PROTOCOLS, Gpu, Link, LinkProtocol, NetworkTier
from tilecast.spec import PRECISIONS, Precision, SpecError


class _FileModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


ModelT = TypeVar("ModelT", bound=_FileModel)
Source = Annotated[str, Field(min_length=1)]
"""Source of numbers: a paper, a data sheet, source code or a fit."""
NAME = r"^[a-z0-9][a-z0-9.-]{0,62}$"


class GpuFile(_FileModel):
    """The content of a GPU file, which is in `gpus/*.toml` or comes from a user."""

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
    sources: dict[str, Source] = Field(min_length=1)

    def to_gpu(self) -> Gpu:
        """Return the GPU that the file describes, in SI units."""
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
            aliases=tuple(normalise_product(alias) for alias in (self.name, self.product, *self.aliases)),
        )


class MigProfileFile(_FileModel):
    """One MIG profile in `mig.toml`."""

    name: str = Field(pattern=r"^[1-9]g\.[0-9]+gb$")
    compute: PositiveInt
    memory: PositiveInt
    sms: PositiveInt
    memory_gib: PositiveFloat
    instances: PositiveInt


class MigGpuFile(_FileModel):
    """GPUs in `mig.toml` that have the same MIG profiles, with these profiles."""

    names: tuple[str, ...]
    compute_slices: PositiveInt
    memory_slices: PositiveInt
    source: Source
    profiles: tuple[MigProfileFile, ...]


class MigFile(_FileModel):
    """The content of `mig.toml`."""

    gpu: tuple[MigGpuFile, ...]


class StackFile(_FileModel):
    """Size and bandwidth of one memory stack in `boards.toml`."""

    gb: PositiveFloat
    bandwidth_gb_per_s: PositiveFloat
    source: Source


class BoardsFile(_FileModel):
    """The content of `boards.toml`."""

    max_ratio: float = Field(gt=1)
    """Largest ratio between the memory, power or clock of a board and that of the shipped GPU."""
    same_size: float = Field(gt=0, lt=0.5)
    """Largest relative difference of two numbers of a board that count as equal."""
    same_figure: float = Field(gt=0, lt=0.5)
    """Largest relative difference of two numbers in GPU files that count as equal."""
    stacks: dict[str, StackFile]
    """Memory stacks by type of memory."""


class ProtocolFile(_FileModel):
    """Constants of one NCCL protocol on a type of link."""

    start_us: PositiveFloat
    hop_us: PositiveFloat
    share: PositiveFloat


class ConstantsFile(_FileModel):
    """Constants of collectives on one type of link, from `protocols.toml` or from a link file."""

    ll: ProtocolFile | None = None
    ll128: ProtocolFile | None = None
    simple: ProtocolFile
    message: ProtocolFile | None = None
    peer_us: PositiveFloat
    own_share: float = Field(ge=0, le=1, default=0.0)
    reduction_start_us: float = Field(ge=0, default=0.0)
    spread: float = Field(ge=0)
    source: Source


class TierFile(_FileModel):
    """A tier of network switches in a link file."""

    nodes: PositiveInt
    oversubscription: float = Field(ge=1)


class LinkFile(_FileModel):
    """The content of a link file, which is in `links/*.toml` or comes from a user."""

    name: str = Field(pattern=NAME)
    kind: str
    bandwidth_gb_per_s: PositiveFloat
    efficiency: float = Field(gt=0, le=1)
    protocols: str | ConstantsFile
    """Name of a table of `protocols.toml`, or the table itself."""
    per_node: bool = False
    nics: PositiveInt = 1
    gpu_nics: PositiveInt = 1
    switched: bool = True
    wired: tuple[tuple[PositiveFloat, Annotated[float, Field(gt=0, le=1)]], ...] = ()
    domain: int = Field(ge=0, default=0)
    beyond: str | None = None
    reduction_gb_per_s: float = Field(ge=0, default=0.0)
    tiers: tuple[TierFile, ...] = ()
    sources: dict[str, Source] = Field(min_length=1)

    @field_validator("wired")
    @classmethod
    def _require_distinct_counts(cls, wired: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        """Raise ValueError if two pairs of `wired` have the same number of GPUs. Otherwise return `wired`."""
        if len({count for count, _ in wired}) < len(wired):
            raise ValueError("a number of GPUs appears twice")
        return wired

    def to_link(self, other_links: Mapping[str, Link]) -> Link:
        """Return the link that the file describes, in SI units.

        Args:
            other_links: the links that `beyond` may name, by name.

        Raises:
            SpecError: the table of protocols or the link in `beyond` is unknown. The link in `beyond` is this link
                itself, or has a `beyond` too. A protocol is faster than the bandwidth.
        """
        next_link = other_links.get(self.beyond or "")
        if self.beyond and (self.beyond == self.name or (next_link and next_link.beyond)):
            raise make_link_chain_error(self)
        beyond = find_entry_by_name(other_links, self.beyond, f"{self.name}: beyond") if self.beyond else None
        constants = self.protocols
        if isinstance(constants, str):
            constants = find_entry_by_name(read_protocol_tables(), constants, f"{self.name}: protocols")
        stated = {name: one for name in (*PROTOCOLS, MESSAGE) if (one := getattr(constants, name))}
        for name, one in stated.items():
            if one.share * self.efficiency > 1:
                problem = f"{one.share:g} of {self.efficiency:g} of the bandwidth is more than all of it"
                raise SpecError(f"{self.name}: protocols.{name}.share", problem, "lower it, or the efficiency")
        return Link(
            name=self.name,
            kind=self.kind,
            bandwidth_bytes_per_s=self.bandwidth_gb_per_s * 1e9,
            efficiency=self.efficiency,
            protocols={
                name: LinkProtocol(one.start_us * 1e-6, one.hop_us * 1e-6, one.share) for name, one in stated.items()
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
            tiers=tuple(NetworkTier(tier.nodes, tier.oversubscription) for tier in self.tiers),
            spread=constants.spread,
        )


def normalise_product(product: str) -> str:
    """Return a product string in lower case, with words joined by hyphens and without the maker's name.

    >>> normalise_product("NVIDIA A100-SXM4-80GB") == normalise_product("nvidia-a100_sxm4_80gb")
    True
    """
    text = "".join(ch if ch.isalnum() else "-" for ch in product.lower())
    words = [word for word in text.split("-") if word not in ("", "nvidia", "tesla")]
    return "-".join(words)


def make_link_chain_error(link: LinkFile) -> SpecError:
    """Return the error for a link whose `beyond` names the link itself, or a link that also has a `beyond`."""
    problem = f"{link.beyond!r} is the link itself or has another beyond it"
    return SpecError(f"{link.name}: beyond", problem, "name a link that has none beyond it")


NamedT = TypeVar("NamedT")


def find_entry_by_name(table: Mapping[str, NamedT], name: str, field: str) -> NamedT:
    """Return the entry with a name in a table.

    Args:
        table: the entries by name.
        name: name of the entry.
        field: input field that contains the name, for the message.

    Raises:
        SpecError: there is no such entry. The message names the most similar entry, or how to list all entries.
    """
    if name not in table:
        near = get_close_matches(name[:64].lower(), table, n=1)
        known = "`tilecast show links` lists them" if field == "link" else f"known: {', '.join(table)}"
        remedy = f"did you mean {near[0]}?" if near else known
        raise SpecError(field, f"unknown {field.split()[-1]} {name[:64]!r}", remedy)
    return table[name]


@cache
def read_protocol_tables() -> Mapping[str, ConstantsFile]:
    """Return the constants of collectives in `protocols.toml`, by name of their table."""
    table = shipped.read_table("tilecast.hardware", "protocols.toml")
    return {name: ConstantsFile.model_validate(row) for name, row in table.items()}


def read_specifications(path: Path | Traversable, schema: type[ModelT]) -> ModelT:
    """Return the content of a TOML file as an instance of its schema.

    Raises:
        SpecError: the file cannot be read, is not TOML, or breaks the schema. The message names the key.
    """
    try:
        return schema.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise SpecError(str(path), "cannot be read", str(error.strerror or error)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(path.name, "is not TOML", str(error)) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SpecError(
            f"{path.name}: {where}", first["msg"], f"see `tilecast.hardware.{schema.__name__}` for the schema"
        ) from None
