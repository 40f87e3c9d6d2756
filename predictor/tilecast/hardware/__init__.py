"""GPUs, links and MIG profiles, read from the TOML files beside this module.

Every number has its unit in its key and its source in the same file. Loading checks the files: an unknown key, a
missing key or an implausible value is refused with the file's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from tilecast import shipped
from tilecast.hardware.boards import complete_specifications, derive_board, describe_board
from tilecast.hardware.products import (
    MESSAGE,
    MIG_INFIX,
    PROTOCOLS,
    Gpu,
    Link,
    LinkProtocol,
    MigProfile,
    NetworkTier,
    Pool,
)
from tilecast.hardware.schema import (
    NAME,
    GpuFile,
    LinkFile,
    MigFile,
    build_chain_error,
    find_named,
    normalise_product,
    read_facts,
)
from tilecast.spec import SpecError

__all__ = [
    "LINKS",
    "MESSAGE",
    "NAME",
    "PROTOCOLS",
    "Gpu",
    "GpuFile",
    "Link",
    "LinkFile",
    "LinkProtocol",
    "MigProfile",
    "NetworkTier",
    "Pool",
    "complete_gpu",
    "digest_fact_files",
    "find_gpu",
    "find_link",
    "find_link_file",
    "find_slice",
    "gpus",
    "links",
    "load_gpu",
    "load_link",
    "mig_profiles",
    "normalise_product",
    "read_gpu_file",
    "use_links",
]  # fmt: skip


def load_gpu(path: Path | Traversable) -> Gpu:
    """Read a GPU from a TOML file of the `GpuFile` schema.

    Raises:
        SpecError: the file cannot be read, is not TOML, or breaks the schema; the message names the key.
    """
    return read_facts(path, GpuFile).to_gpu()


@cache
def gpus() -> Mapping[str, Gpu]:
    """Return every GPU that ships with Tilecast, by name."""
    return {facts.name: facts.to_gpu() for facts in _gpu_files()}


@cache
def _gpu_files() -> tuple[GpuFile, ...]:
    return tuple(read_facts(path, GpuFile) for path in shipped.list_files("tilecast.hardware", "gpus"))


def complete_gpu(specifications: GpuFile) -> Gpu:
    """Return the GPU that a user specified. The shipped file of the same product supplies missing specifications."""
    whole, sibling = complete_specifications(specifications, _gpu_files())
    return replace(whole.to_gpu(), sibling=sibling)


LINKS = "TILECAST_LINKS"
"""Environment variable that names a folder of link files."""
_link_folder = ""


def use_links(folder: str) -> None:
    """Add the link files of a folder to the shipped link files; an empty `folder` adds none.

    A program calls this function once, where it starts. A folder that does not exist is an error only when a link is
    looked up.
    """
    global _link_folder
    _link_folder = folder


def links() -> Mapping[str, Link]:
    """Return every link by name.

    Links ship with Tilecast or come from the TOML files in the folder of `use_links`. If a name is in the folder and
    among the shipped links, the link of the folder is returned.

    Raises:
        SpecError: the folder or a file in it cannot be read, or breaks the `LinkFile` schema.
    """
    return _read_links(_link_folder)


@cache
def _read_link_files(folder: str) -> Mapping[str, LinkFile]:
    if folder and not Path(folder).is_dir():
        raise SpecError(LINKS, f"{folder} is no folder", "name the folder that holds your link files")
    mine = sorted(Path(folder).glob("*.toml")) if folder else []
    facts = [read_facts(path, LinkFile) for path in (*shipped.list_files("tilecast.hardware", "links"), *mine)]
    return {item.name: item for item in facts}


@cache
def _read_links(folder: str) -> Mapping[str, Link]:
    facts = _read_link_files(folder)
    plain = {name: item.to_link({}) for name, item in facts.items() if not item.beyond}
    joined = [item for item in facts.values() if item.beyond]
    for item in joined:
        if item.beyond in facts and item.beyond not in plain:
            raise build_chain_error(item)
    return dict(sorted((plain | {item.name: item.to_link(plain) for item in joined}).items()))


def read_gpu_file(name: str) -> GpuFile:
    """Return the shipped file of a GPU, with its sources.

    A MIG slice has the file of its whole GPU. A board derived from a shipped GPU has the file of that GPU, with the
    memory, power and clock of the board.

    Raises:
        SpecError: no GPU has the name.
    """
    gpu = find_gpu(name)
    shipped_name = gpu.sibling or gpu.name.partition(MIG_INFIX)[0]
    facts = next(item for item in _gpu_files() if item.name == shipped_name)
    return describe_board(gpu, facts) if gpu.sibling else facts


def find_link_file(name: str) -> LinkFile:
    """Return the file of a link with its sources. It is shipped, or it lies in the folder that `use_links` set.

    Raises:
        SpecError: there is no such link.
    """
    return find_named(_read_link_files(_link_folder), find_link(name).name, "link")


def load_link(path: Path | Traversable) -> Link:
    """Read a link from a TOML file of the `LinkFile` schema.

    Raises:
        SpecError: the file cannot be read, is not TOML, or breaks the schema; the message names the key.
    """
    return read_facts(path, LinkFile).to_link(links())


@cache
def digest_fact_files() -> str:
    """Return the SHA-256 of the data files in this folder: GPUs, boards, links, protocols, MIG and instance types."""
    root = files("tilecast.hardware")
    paths = [
        root.joinpath("protocols.toml"),
        root.joinpath("mig.toml"),
        root.joinpath("boards.toml"),
        *(item for name in ("gpus", "links", "nodes") for item in shipped.list_files("tilecast.hardware", name)),
    ]
    return hashlib.sha256(b"".join(item.read_bytes() for item in paths)).hexdigest()


@cache
def _mig_profiles_by_gpu() -> Mapping[str, tuple[MigProfile, ...]]:
    table = read_facts(files("tilecast.hardware").joinpath("mig.toml"), MigFile)
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
    """Return the MIG slices that a whole GPU can be cut into, smallest first.

    The result is empty if the GPU cannot be cut, or if Tilecast has no data about its slices.
    """
    return () if gpu.mig else _mig_profiles_by_gpu().get(gpu.name, ())


def find_slice(gpu: Gpu, profile: str) -> Gpu:
    """Return the MIG slice of a GPU that a profile describes, for instance `1g.10gb`.

    Raises:
        SpecError: the GPU has no such profile.
    """
    profiles = {normalise_product(item.name): item for item in mig_profiles(gpu)}
    if normalise_product(profile) not in profiles:
        known = ", ".join(item.name for item in profiles.values())
        raise SpecError("mig", f"{gpu.name} has no profile {profile!r}", f"use one of {known}" if known else "drop it")
    return profiles[normalise_product(profile)].slice_gpu(gpu)


def find_gpu(name: str) -> Gpu:
    """Return the GPU whose name or product string is `name`; for `GPU-MIG-PROFILE`, return the MIG slice.

    A name that differs from a shipped GPU only in memory, power or clock, such as `A100-PCIe-96GB`, is a board that
    `boards.derive_board` derives from that GPU.

    Raises:
        SpecError: no GPU has the name; the message offers the nearest name, or the limit that the board exceeds.
    """
    whole, cut, profile = name.lower().partition(MIG_INFIX)
    if cut:
        return find_slice(find_gpu(whole), profile)
    key = normalise_product(name)
    table = gpus()
    for gpu in table.values():
        if key in gpu.aliases:
            return gpu
    derived = derive_board(key, table)
    if derived is not None:
        return derived
    near = get_close_matches(key, [alias for gpu in table.values() for alias in gpu.aliases], n=1, cutoff=_CLOSE)
    meant = next((gpu.name for gpu in table.values() if near and near[0] in gpu.aliases), None)
    hint = f"did you mean {meant}?" if meant else f"known are NVIDIA's {', '.join(table)}"
    raise SpecError("gpu", f"unknown GPU {name!r}", hint)


_CLOSE = 0.7
"""Least similarity of two names (difflib's ratio) to suggest one: 4090 suggests RTX 4090, MI300X suggests no B300."""


def find_link(name: str) -> Link:
    """Return the link with a name.

    Raises:
        SpecError: there is no such link.
    """
    return find_named(links(), name, "link")
