"""Build the operator's image, with Docker if an engine answers, else with buildah on a base made by debootstrap.

    python tools/image.py                # builds localhost/tilecast:dev, prints its digest, size and start-up time

Without an engine the base is Debian's Python from `debootstrap`, kept under a local name; both programs then need root,
and no image registry is contacted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EPOCH = "315532800"
"""1980-01-01, the earliest time that a wheel can hold."""
BASE = "localhost/tilecast-base:bookworm"
_PACKAGES = "ca-certificates,python3,python3-venv,python3-pip"
_FROM_HOST = ("/etc/ssl/certs", "/etc/pip.conf")
"""Paths of the host's settings for package downloads; they are read during the build and not kept."""


class ImageError(Exception):
    """The image cannot be built; the message says what is missing or what went wrong."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image that was built."""

    engine: str
    tag: str
    digest: str
    size_bytes: int

    def run(
        self, entrypoint: str, *arguments: str, timeout_s: float = 120, user: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run one of its programs as its own user, or as another `number:group`."""
        chosen = [f"--user={user}"] if user else []
        if self.engine == "docker":
            options = ["--rm", "--read-only", *chosen, f"--entrypoint={entrypoint}"]
            command = ["docker", "run", *options, self.tag, *arguments]
            return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        container = _output(["buildah", "from", "--pull-never", self.tag])
        try:
            command = ["buildah", "run", "--isolation=chroot", *chosen, container, "--", entrypoint, *arguments]
            return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        finally:
            _output(["buildah", "rm", container])


def prepare() -> str:
    """Return the program that can build an image here, with a base image to build on.

    Raises:
        ImageError: there is no such program, or there is no base and none can be made.
    """
    engine = _engine()
    if engine == "buildah" and not _succeeds(["buildah", "inspect", BASE]):
        _make_base()
    return engine


def _engine() -> str:
    if shutil.which("docker") and _succeeds(["docker", "info"]):
        return "docker"
    missing = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    if missing:
        raise ImageError(f"no Docker engine answers, and {' and '.join(missing)} is not installed")
    if os.geteuid() != 0:
        raise ImageError("no Docker engine answers, and buildah needs root here")
    return "buildah"


def build(tag: str) -> Image:
    """Build the image under a name.

    Raises:
        ImageError: no program can build it, or the build failed.
    """
    engine = prepare()
    if engine == "docker":
        variables = {"SOURCE_DATE_EPOCH": EPOCH}
        _output(["docker", "build", f"--build-arg=SOURCE_DATE_EPOCH={EPOCH}", f"--tag={tag}", str(ROOT)], variables)
        inspected = _output(["docker", "image", "inspect", "--format={{.Id}} {{.Size}}", tag]).split()
        return Image(engine, tag, inspected[0], int(inspected[1]))
    shared = [f"--volume={path}:{path}:ro" for path in _FROM_HOST if Path(path).exists()]
    _output(
        ["buildah", "bud", "--isolation=chroot", "--pull-never", f"--timestamp={EPOCH}", *shared,
         f"--build-arg=BASE_IMAGE={BASE}", f"--tag={tag}", str(ROOT)]
    )  # fmt: skip
    digest = _output(["buildah", "inspect", "--type=image", "--format={{.FromImageDigest}}", tag])
    return Image(engine, tag, digest, _size_bytes(tag))


def push(tag: str, path: Path) -> None:
    """Write an image that buildah has built as an archive for `docker load`.

    Raises:
        ImageError: there is no such image, or it cannot be written.
    """
    _output(["buildah", "push", tag, f"docker-archive:{path}:{tag}"])


def _make_base() -> None:
    print("making the base image (about a minute)", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        _output(["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(root)])
        container = _output(["buildah", "from", "scratch"])
        try:
            _output(["buildah", "add", container, str(root), "/"])
            _output(["buildah", "commit", container, BASE])
        finally:
            _output(["buildah", "rm", container])


def _size_bytes(tag: str) -> int:
    container = _output(["buildah", "from", "--pull-never", tag])
    try:
        mounted = _output(["buildah", "mount", container])
        return int(_output(["du", "--summarize", "--bytes", "--one-file-system", mounted]).split()[0])
    finally:
        _output(["buildah", "rm", container])


def _succeeds(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _output(command: Sequence[str], variables: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **(variables or {})})
    if done.returncode:
        raise ImageError(f"{' '.join(command[:2])} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout.strip()


def main() -> int:
    """Build the image, and print its size and the time of its first answer."""
    parser = argparse.ArgumentParser(description="Build the operator's image.")
    parser.add_argument("--tag", default="localhost/tilecast:dev")
    try:
        image = build(parser.parse_args().tag)
    except ImageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    start = time.perf_counter()
    image.run("tilecast", "show", "gpus")
    print(f"{image.tag} {image.digest}: {image.size_bytes / 2**20:.0f} MiB, by {image.engine}")
    print(f"first answer of its command line after {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
