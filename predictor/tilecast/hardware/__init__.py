"""GPUs, links and MIG profiles, read from the TOML files in this folder.

The key of every number names its unit, and the file names its source. A file with an unknown key, a missing key or an
implausible value is refused.
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
    find_entry_by_name,
    make_link_chain_error,
    normalise_product,
    read_specifications,
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
    "digest_data_files",
    "find_gpu",
    "find_link",
    "find_link_file",
    "find_mig_slice",
    "list_gpu_names",
    "list_gpus",
    "list_links",
    "list_mig_profiles",
    "load_gpu",
    "load_link",
    "normalise_product",
    "read_gpu_file",
    "set_link_folder",
]  # fmt: skip


def load_gpu(path: Path | Traversable) -> Gpu:
    """Return the GPU in a TOML file of the `GpuFile` schema.

    Raises:
        SpecError: the file cannot be read, is not TOML, or breaks the schema. The message names the key.
    """
    return read_specifications(path, GpuFile).to_gpu()


@cache
def list_gpus() -> Mapping[str, Gpu]:
    """Return all GPUs that ship with Tilecast, by name."""
    return {name: _load_shipped_gpu(name) for name in list_gpu_names()}


def list_gpu_names() -> tuple[str, ...]:
    """Return the names of all GPUs that ship with Tilecast, without reading their files."""
    return _list_names("gpus")


@cache
def _list_names(folder: str) -> tuple[str, ...]:
    """Return the names of the GPUs or the links that ship with Tilecast. Each is the name of its file in the folder."""
    return tuple(path.name.removesuffix(".toml") for path in shipped.list_files("tilecast.hardware", folder))


@cache
def _load_shipped_gpu(name: str) -> Gpu:
    return _read_gpu_file(name).to_gpu()


@cache
def _read_gpu_file(name: str) -> GpuFile:
    """Return the content of the file of a GPU that ships with Tilecast."""
    return read_specifications(files("tilecast.hardware").joinpath("gpus", f"{name}.toml"), GpuFile)


def _read_gpu_files() -> tuple[GpuFile, ...]:
    """Return the contents of all GPU files that ship with Tilecast."""
    return tuple(map(_read_gpu_file, list_gpu_names()))


def complete_gpu(specifications: GpuFile) -> Gpu:
    """Return the GPU that a user specified. Missing numbers come from the shipped file of the same product."""
    whole, sibling = complete_specifications(specifications, _read_gpu_files())
    return replace(whole.to_gpu(), sibling=sibling)


LINKS = "TILECAST_LINKS"
"""Environment variable that names a folder of link files."""
_link_folder = ""


def set_link_folder(folder: str) -> None:
    """Add the link files of a folder to the shipped link files. An empty `folder` adds no files.

    A program calls this once, at its start. If the folder does not exist, the first look-up of a link raises an error.
    """
    global _link_folder
    _link_folder = folder


def list_links() -> Mapping[str, Link]:
    """Return all links by name: those that ship with Tilecast, and those in the folder of `set_link_folder`.

    If a link in the folder has the name of a shipped link, it replaces the shipped link.

    Raises:
        SpecError: the folder or a file in it cannot be read, or breaks the `LinkFile` schema.
    """
    return _read_links(_link_folder)


@cache
def _read_link_files(folder: str) -> Mapping[str, LinkFile]:
    """Return the contents of the shipped link files and of the link files in a folder, by name of the link."""
    if folder and not Path(folder).is_dir():
        raise SpecError(LINKS, f"{folder} is no folder", "name the folder that holds your link files")
    mine = sorted(Path(folder).glob("*.toml")) if folder else []
    own = (read_specifications(path, LinkFile) for path in mine)
    return {name: _read_link_file(name) for name in _list_names("links")} | {item.name: item for item in own}


@cache
def _read_link_file(name: str) -> LinkFile:
    """Return the content of the file of a link that ships with Tilecast."""
    return read_specifications(files("tilecast.hardware").joinpath("links", f"{name}.toml"), LinkFile)


@cache
def _load_shipped_link(name: str) -> Link:
    link_file = _read_link_file(name)
    return link_file.to_link({link_file.beyond: _load_shipped_link(link_file.beyond)} if link_file.beyond else {})


@cache
def _read_links(folder: str) -> Mapping[str, Link]:
    """Return the shipped links and the links in a folder, sorted by name."""
    link_files = _read_link_files(folder)
    plain = {name: item.to_link({}) for name, item in link_files.items() if not item.beyond}
    joined = [item for item in link_files.values() if item.beyond]
    for item in joined:
        if item.beyond in link_files and item.beyond not in plain:
            raise make_link_chain_error(item)
    return dict(sorted((plain | {item.name: item.to_link(plain) for item in joined}).items()))


def read_gpu_file(name: str) -> GpuFile:
    """Return the content of the file of a GPU, with the sources of its numbers.

    For a MIG slice, return the file of the whole GPU. For a board that is derived from a shipped GPU, return the file
    of that GPU with the memory, power and clock of the board.

    Raises:
        SpecError: no GPU has the name.
    """
    gpu = find_gpu(name)
    shipped_name = gpu.sibling or gpu.name.partition(MIG_INFIX)[0]
    gpu_file = _read_gpu_file(shipped_name)
    return describe_board(gpu, gpu_file) if gpu.sibling else gpu_file


def find_link_file(name: str) -> LinkFile:
    """Return the content of the file of a link, with the sources of its numbers.

    The file ships with Tilecast, or it is in the folder of `set_link_folder`.

    Raises:
        SpecError: there is no such link.
    """
    return find_entry_by_name(_read_link_files(_link_folder), find_link(name).name, "link")


def load_link(path: Path | Traversable) -> Link:
    """Return the link in a TOML file of the `LinkFile` schema.

    Raises:
        SpecError: the file cannot be read, is not TOML, or breaks the schema. The message names the key.
    """
    return read_specifications(path, LinkFile).to_link(list_links())


@cache
def digest_data_files() -> str:
    """Return the SHA-256 over all shipped files of GPUs, boards, links, protocols, MIG profiles and instance types."""
    root = files("tilecast.hardware")
    paths = [
        root.joinpath("protocols.toml"),
        root.joinpath("mig.toml"),
        root.joinpath("boards.toml"),
        *(item for name in ("gpus", "links", "nodes") for item in shipped.list_files("tilecast.hardware", name)),
    ]
    return hashlib.sha256(b"".join(item.read_bytes() for item in paths)).hexdigest()


@cache
def _read_mig_profiles() -> Mapping[str, tuple[MigProfile, ...]]:
    """Return the MIG profiles in `mig.toml`, by name of the GPU."""
    table = read_specifications(files("tilecast.hardware").joinpath("mig.toml"), MigFile)
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


def list_mig_profiles(gpu: Gpu) -> tuple[MigProfile, ...]:
    """Return the MIG profiles of a GPU, smallest first.

    The result is empty for a MIG slice, for a GPU without MIG, and for a GPU whose profiles Tilecast does not know.
    """
    return () if gpu.mig else _read_mig_profiles().get(gpu.name, ())


def find_mig_slice(gpu: Gpu, profile: str) -> Gpu:
    """Return the MIG slice of a GPU with a profile such as `1g.10gb`.

    Raises:
        SpecError: the GPU has no such profile.
    """
    profiles = {normalise_product(item.name): item for item in list_mig_profiles(gpu)}
    if normalise_product(profile) not in profiles:
        known = ", ".join(item.name for item in profiles.values())
        raise SpecError("mig", f"{gpu.name} has no profile {profile!r}", f"use one of {known}" if known else "drop it")
    return profiles[normalise_product(profile)].slice_gpu(gpu)


def find_gpu(name: str) -> Gpu:
    """Return the GPU whose name or product string is `name`. For a name `GPU-MIG-PROFILE`, return the MIG slice.

    If `name` differs from a shipped GPU only in memory, power or clock, such as `A100-PCIe-96GB`, return the board that
    `boards.derive_board` derives from this GPU.

    Raises:
        SpecError: no GPU has the name, or the board differs too much from the shipped GPU. The message names the most
            similar GPU or the limit.
    """
    whole, cut, profile = name.lower().partition(MIG_INFIX)
    if cut:
        return find_mig_slice(find_gpu(whole), profile)
    key = normalise_product(name)
    if key in list_gpu_names():
        return _load_shipped_gpu(key)
    table = list_gpus()
    for gpu in table.values():
        if key in gpu.aliases:
            return gpu
    derived = derive_board(key, table)
    if derived is not None:
        return derived
    near = get_close_matches(key, [alias for gpu in table.values() for alias in gpu.aliases], n=1, cutoff=_CLOSE)
    meant = next((gpu.name for gpu in table.values() if near and near[0] in gpu.aliases), None)
    maker = next((maker for maker, names in _OTHER_MAKERS.items() if key.startswith(names)), None)
    hint = f"did you mean {meant}?" if meant else "`tilecast show gpus` lists those that are known"
    if maker is not None:
        hint = f"it is {maker}'s, and only GPUs of NVIDIA are known: `tilecast show gpus` lists them"
    raise SpecError("gpu", f"unknown GPU {name[:64]!r}", hint)


_OTHER_MAKERS: Mapping[str, tuple[str, ...]] = {
    "AMD": ("mi", "instinct", "amd", "radeon", "rx-"),
    "Google": ("tpu",),
    "AWS": ("trn", "trainium", "inf1", "inf2", "inferentia"),
    "Intel": ("gaudi", "hl-", "intel"),
    "Huawei": ("ascend",),
    "Apple": ("apple", "m1", "m2", "m3", "m4"),
}
"""Makers of other accelerators, and prefixes of their products' names."""


_CLOSE = 0.7
"""Least similarity (difflib's ratio) at which a name is suggested for an unknown one.

The name 4090 then suggests RTX 4090, but MI300X does not suggest B300.
"""


def find_link(name: str) -> Link:
    """Return the link with a name.

    Raises:
        SpecError: there is no such link.
    """
    if not _link_folder and name in _list_names("links"):
        return _load_shipped_link(name)
    return find_entry_by_name(list_links(), name, "link")
