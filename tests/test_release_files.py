"""Files of a release: workflows, packages that install alone, kubectl's plugin, citation and the chart's page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest
import yaml

from tilecast.api import crds

ROOT = Path(__file__).resolve().parent.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
CHART = yaml.safe_load((ROOT / "charts" / "tilecast" / "Chart.yaml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKE = (ROOT / "Makefile").read_text()


def test_every_file_names_one_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {VERSION} == {citation["version"], CHART["version"], CHART["appVersion"]}
    assert citation["cff-version"] == "1.2.0" and citation["authors"] and citation["title"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_what_the_repository_has(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}, "more only where a job needs it"
    for name, job in workflow["jobs"].items():
        for needed in [job.get("needs", [])] if isinstance(job.get("needs", []), str) else job.get("needs", []):
            assert needed in workflow["jobs"], name
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file()
        for step in job.get("steps", ()):
            for target in re.findall(r"^make (\S+)", step.get("run", ""), re.MULTILINE):
                assert re.search(rf"^{target}:", MAKE, re.MULTILINE), f"{path.name}: make {target}"
            assert not re.search(r"secrets\.", step.get("run", "")), "a secret reaches a shell as a variable alone"


def test_a_person_sets_up_every_variable_of_the_workflows() -> None:
    listed = (ROOT / "docs" / "releasing.md").read_text()
    for path in WORKFLOWS:
        for name in re.findall(r"(?:vars|secrets)\.(\w+)", path.read_text()):
            assert f"`{name}`" in listed, name


def test_the_page_of_the_chart_lists_the_custom_resources() -> None:
    listed = yaml.safe_load(CHART["annotations"]["artifacthub.io/crds"])
    assert {(item["kind"], item["name"]) for item in listed} == {
        (resource.kind, f"{resource.plural}.tilecast.dev") for resource in crds.RESOURCES
    }


def test_the_manifest_of_the_plugin_names_files_of_its_archive(tmp_path: Path) -> None:
    template = (ROOT / ".krew.yaml").read_text()
    filled = re.sub(r"{{ addURIAndSha .* }}", "uri: x\n      sha256: y", template)
    filled = filled.replace("{{ .TagName }}", "v1.2.3").replace("{{ .Homepage }}", "x")
    assert "{{" not in filled
    (platform,) = yaml.safe_load(filled)["spec"]["platforms"]
    files = {item["from"] for item in platform["files"]}
    assert platform["bin"] in files
    command = next(line for line in MAKE.splitlines() if line.startswith("\ttar ")).strip()
    (tmp_path / "dist").mkdir()
    words = command.replace(" dist/", f" {tmp_path}/dist/").split()
    subprocess.run(words, check=True, cwd=ROOT)
    with tarfile.open(tmp_path / "dist" / "kubectl-tilecast.tar.gz") as archive:
        assert set(archive.getnames()) == files
        assert archive.getmember(platform["bin"]).mode & 0o111


@pytest.mark.long
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_package_installs_alone(kind: str, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (package,) = tmp_path.iterdir()
    home = tmp_path / "home"
    venv.create(home, with_pip=True)
    pip = subprocess.run([home / "bin" / "pip", "install", package], capture_output=True, text=True, check=False)
    assert pip.returncode == 0, pip.stdout[-2000:] + pip.stderr[-2000:]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TILECAST"))}

    def run(*words: str) -> str:
        done = subprocess.run(
            [home / "bin" / words[0], *words[1:]], env=clean, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    for program in ("tilecast", "kubectl-tilecast"):
        shown = run(program, "advise", "gpt2", "--seq", "1024", "--batch", "64", "--gpus", "l4:1")
        assert "l4" in shown and "TOK/S/GPU" in shown
    lines = (
        "import tilecast",
        f"assert tilecast.__version__ == {VERSION!r}",
        "print(tilecast.fits('gpt2', seq=1024, batch=8, gpus='l4:1'))",
    )
    assert "l4" in run("python", "-W", "error", "-c", "\n".join(lines))
