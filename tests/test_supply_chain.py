"""Files shipped beside the image: scanners' findings with their reasons, licences, and the bundle."""

from __future__ import annotations

import csv
import hashlib
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

import binaries
import bundle
import checkov
import licences
from conftest import Helm

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "tilecast"
FREE = ("Apache", "BSD", "MIT", "PSF", "MPL-2.0", "ISC", "0BSD", "Zlib", "CC0")
DIGEST = "sha256:" + "ab" * 32


def test_every_package_of_the_image_has_a_licence_that_lets_it_be_passed_on() -> None:
    packages = list(licences.packages())
    assert len(packages) > 25
    assert [package.name for package in packages if not any(word in package.licence for word in FREE)] == []
    assert [package.name for package in packages if "GPL" in package.licence] == []


def documented() -> set[tuple[str, str]]:
    page = (ROOT / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| `([\w, -]+)` \| `(CKV\w+)` \| \w", page, re.MULTILINE)
    return {(name, check) for names, check in rows for name in names.split(", ")}


@pytest.mark.cluster
@pytest.mark.parametrize("framework", ["kubernetes", "dockerfile"])
def test_checkov_finds_what_is_documented_and_no_more(helm: Helm, tmp_path: Path, framework: str) -> None:
    if framework == "dockerfile":
        file = tmp_path / "Dockerfile"
        file.write_text((ROOT / "Dockerfile").read_text())
    else:
        file = tmp_path / "rendered.yaml"
        values = f"--set=networkPolicy.enabled=true,replicas=2,jobs.enabled=true,jobs.place=true,image.digest={DIGEST}"
        values += ",web.enabled=true"
        file.write_text(helm("template", "tilecast", str(CHART), "--namespace=tilecast-system", values))
    remarks = {
        (re.split(r"[./]", item.resource.rstrip("."))[-1], item.check) for item in checkov.findings(file, framework)
    }
    names = {name for name, _ in remarks}
    assert remarks == {(name, check) for name, check in documented() if name in names}


@pytest.mark.cluster
def test_the_bundle_holds_what_it_says_and_installs(helm: Helm, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bundle.py"), "--image", f"registry.example/tilecast@{DIGEST}",
         "--output", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    digest, name = done.stdout.split()
    assert hashlib.sha256(Path(name).read_bytes()).hexdigest() == digest
    with tarfile.open(name) as archive:
        archive.extractall(tmp_path / "out", filter="data")
    (folder,) = (tmp_path / "out").iterdir()
    sums = dict(reversed(line.split("  ")) for line in (folder / bundle.SUMS).read_text().splitlines())
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files - {bundle.SUMS} == sums.keys()
    assert all(hashlib.sha256((folder / file).read_bytes()).hexdigest() == digest for file, digest in sums.items())
    crds = {path.name: path.read_text() for path in (CHART / "crds").iterdir()}
    assert {path.name: path.read_text() for path in (folder / "crds").iterdir()} == crds
    (chart,) = folder.glob("*.tgz")
    rendered = helm("template", "tilecast", str(chart), f"--set=image.repository=mine/tilecast,image.digest={DIGEST}")
    (deployment,) = (item for item in yaml.safe_load_all(rendered) if item and item["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"mine/tilecast@{DIGEST}"
    assert len(list((folder / "wheels").glob("tilecast-*.whl"))) == 1
    rows = list(csv.DictReader((folder / "licences.csv").open()))
    assert {"kopf", "numpy", "onnxruntime"} <= {row["name"] for row in rows}
    assert (folder / "images.txt").read_text() == f"registry.example/tilecast@{DIGEST}\n"
    assert chart.name in (folder / "install.md").read_text()


@pytest.mark.parametrize("image", ["", "two words", "UPPER/case", "a@sha256:12"])
def test_what_is_no_reference_is_refused_in_a_line(image: str, tmp_path: Path) -> None:
    with pytest.raises(bundle.BundleError, match="is no reference") as caught:
        bundle.make(image, tmp_path)
    assert "\n" not in str(caught.value)


def test_releasing_names_commands_and_files_that_exist() -> None:
    page = (ROOT / "docs" / "releasing.md").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z0-9-]+)", page)) <= targets
    for path in re.findall(r"(?:tools|tests|charts)/[\w./-]+\w", page):
        assert (ROOT / path).exists(), path
    for word in ("cosign sign", "cosign verify", "cosign attest", "syft", "sbom.cdx.json"):
        assert word in page


def test_go_modules_share_versions_so_that_they_compile_once() -> None:
    pins = [
        binaries.pinned(binaries.TOOLSETS[name]) for name in ("controlplane", "chart", "kueue", "jobset", "trainer")
    ]
    versions: dict[str, set[str]] = {}
    for module, version in (item for pin in pins for item in pin.items()):
        versions.setdefault(module, set()).add(version)
    assert {module: found for module, found in versions.items() if len(found) > 1} == {}
