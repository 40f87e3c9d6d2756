"""Archives of container images in the format of `docker save`, made from files without a container engine."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Contents:
    """Layers of an image, each a tar, and the command that it starts."""

    layers: Sequence[bytes]
    entrypoint: Sequence[str] = ()


def layer(files: Mapping[str, Path], links: Mapping[str, str] | None = None) -> bytes:
    """Return a tar of executable files and of symbolic links, both by their absolute path.

    Equal files give equal bytes, since owners and times are zero.
    """
    buffer, links, folders = io.BytesIO(), links or {}, set[PurePosixPath]()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in sorted({*files, *links}):
            path = PurePosixPath(name).relative_to("/")
            for folder in reversed(path.parents[:-1]):
                if folder not in folders:
                    folders.add(folder)
                    tar.addfile(_entry(folder, tarfile.DIRTYPE))
            if name in links:
                entry = _entry(path, tarfile.SYMTYPE)
                entry.linkname = links[name]
                tar.addfile(entry)
            else:
                content = files[name].read_bytes()
                entry = _entry(path)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def write(path: Path, images: Mapping[str, Contents]) -> None:
    """Write an archive of images by name; layers that several images share are written once."""
    blobs, manifest = dict[str, bytes](), []
    for name, image in images.items():
        digests = [hashlib.sha256(each).hexdigest() for each in image.layers]
        blobs |= {f"{digest}.tar": each for digest, each in zip(digests, image.layers, strict=True)}
        config = {
            "architecture": _ARCHITECTURES[platform.machine()],
            "os": "linux",
            "config": {"Entrypoint": list(image.entrypoint), "Env": [_PATH]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
        }
        raw = json.dumps(config).encode()
        config_name = f"{hashlib.sha256(raw).hexdigest()}.json"
        blobs[config_name] = raw
        manifest.append({"Config": config_name, "RepoTags": [name], "Layers": [f"{digest}.tar" for digest in digests]})
    with tarfile.open(path, "w") as tar:
        for file, content in {**blobs, "manifest.json": json.dumps(manifest).encode()}.items():
            entry = _entry(PurePosixPath(file))
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def _entry(path: PurePosixPath, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(str(path))
    entry.type, entry.mode = kind, 0o755
    return entry
