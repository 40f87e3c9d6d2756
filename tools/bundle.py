"""Make an archive with everything that a cluster without network access needs, and a list of its contents.

    python tools/bundle.py --image REGISTRY/tilecast@sha256:… --output dist

The archive holds `images.txt` (the images to copy into the cluster's own registry), the chart as Helm packages it, its
CRDs, the wheel and, with `--dependencies`, the wheels of every locked package, the lock files, `licences.csv`,
`install.md`, and `SHA256SUMS` over all files (`sha256sum --check SHA256SUMS`). With `--image-archive` it also holds the
image. Equal inputs make equal archives, except for the chart's package, in which Helm writes times. The helm of
`binaries.py` is needed.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

import binaries
import licences

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "tilecast"
LOCKS = ("requirements-operator.lock", "requirements-build.lock", "requirements-sbom.lock")
SUMS = "SHA256SUMS"
_IMAGE = re.compile(r"[a-z0-9][-._a-z0-9:/]*?(:[\w][\w.-]*)?(@sha256:[0-9a-f]{64})?")
INSTALL = """\
# Installing without a way out

1. `sha256sum --check SHA256SUMS` in this folder; compare the digest of the archive with the one you were told.
2. Copy every image of `images.txt` into your registry, for instance `skopeo copy docker://IMAGE docker://REGISTRY/tilecast`,
   or `oci-archive:image.tar` where the archive holds it. Verify the signature before: docs/releasing.md.
3. `kubectl apply --server-side --force-conflicts -f crds`
4. `helm install tilecast {chart} --namespace tilecast --create-namespace --skip-crds \\
     --set image.repository=REGISTRY/tilecast,image.digest=sha256:…`
5. The command line: `pip install --no-index --find-links wheels tilecast`
"""


class BundleError(Exception):
    """The bundle cannot be made; the message is one line with the remedy."""


def make(image: str, output: Path, *, dependencies: bool = False, image_archive: Path | None = None) -> Path:
    """Write the archive and return its path.

    Args:
        image: the reference of the operator's image.
        output: the folder to write to.
        dependencies: whether to download the wheels of the locked packages into it.
        image_archive: the image as a file to include.

    Raises:
        BundleError: a program failed, or the reference is invalid.
        binaries.BinariesError: helm is missing.
    """
    if not _IMAGE.fullmatch(image):
        raise BundleError(f"--image: {image[:80]!r} is no reference; write REGISTRY/tilecast@sha256:…")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    name = f"tilecast-{version}-bundle"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / name
        _fill(folder, image, dependencies)
        if image_archive is not None:
            shutil.copyfile(image_archive, folder / "image.tar")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        sums = [f"{_digest(path)}  {path.relative_to(folder)}" for path in files]
        (folder / SUMS).write_text("\n".join(sums) + "\n", encoding="utf-8")
        output.mkdir(parents=True, exist_ok=True)
        return _archive(folder, output / f"{name}.tar.gz")


def _fill(folder: Path, image: str, dependencies: bool) -> None:
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    helm = binaries.ensure("chart") / "helm"
    _run(str(helm), "package", str(CHART), f"--destination={folder}")
    (chart,) = folder.glob("tilecast-*.tgz")
    pip = (sys.executable, "-m", "pip")
    _run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", f"--wheel-dir={wheels}", str(ROOT))
    if dependencies:
        lock = str(ROOT / LOCKS[0])
        _run(*pip, "download", "--quiet", "--require-hashes", "--only-binary=:all:", f"--dest={wheels}", "-r", lock)
    shutil.copytree(CHART / "crds", folder / "crds")
    for lock in LOCKS:
        shutil.copyfile(ROOT / lock, folder / lock)
    shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")
    (folder / "images.txt").write_text(f"{image}\n", encoding="utf-8")
    (folder / "install.md").write_text(INSTALL.replace("{chart}", chart.name), encoding="utf-8")
    with (folder / "licences.csv").open("w", encoding="utf-8", newline="") as stream:
        licences.write(stream)


def _archive(folder: Path, path: Path) -> Path:
    """Write the folder as a tar with fixed owners, times and order, and return its path."""
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for each in sorted(item for item in folder.rglob("*") if item.is_file()):
            entry, content = tarfile.TarInfo(str(each.relative_to(folder.parent))), each.read_bytes()
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = " ".join(Path(part).name for part in command[:4])
        raise BundleError(f"{words} failed: {done.stderr.strip()[-500:]}")


def main() -> int:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Make the archive for clusters without a way out.")
    parser.add_argument("--image", required=True, help="reference of the operator's image, by digest")
    parser.add_argument("--image-archive", type=Path, help="the image as `skopeo copy … oci-archive:FILE` writes it")
    parser.add_argument("--dependencies", action="store_true", help="download the wheels of the locked packages too")
    parser.add_argument("--output", type=Path, default=Path("dist"))
    given = parser.parse_args()
    try:
        path = make(given.image, given.output, dependencies=given.dependencies, image_archive=given.image_archive)
    except (BundleError, binaries.BinariesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{_digest(path)}  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
