"""The documentation builds without a broken link, its commands run, and its objects and worked examples are valid."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import yaml

from tilecast import collectives, zoo
from tilecast.api import gpu_pool, training_job
from tilecast.cli import main
from tilecast.collectives import RankGroup
from tilecast.hardware import find_link, load_gpu
from tilecast.kernels import utilization
from tilecast.spec import SpecError
from tilecast.zoo import huggingface

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import pages  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^ *```(\w+)(?: title=\"(\w+)\")?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for fence, _, text in FENCE.findall(page.read_text()) if fence == language]


def worked(title: str) -> str:
    (text,) = (
        text for _, heading, text in FENCE.findall((ROOT / "docs" / "extending.md").read_text()) if heading == title
    )
    return text


def commands() -> list[str]:
    """Return every `tilecast` command of the pages up to its pipe; docs/cli.md has its own test."""
    return [
        match[0]
        for page in PAGES
        if page.name != "cli.md"
        for block in blocks(page, "sh")
        for line in block.replace("\\\n", " ").splitlines()
        if (match := re.search(r"\btilecast (?:advise|sweep|show) [^#|>;]*", line))
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from test_huggingface import config
    from test_traced_onnx import gpt_in_onnx
    from tilecast.zoo.traced import document, onnx_file

    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "job.yaml").symlink_to(ROOT / "examples" / "jobs" / "llama-7b-pretrain.yaml")
    (tmp_path / "config.json").write_text(json.dumps(config("llama")))
    (tmp_path / "nodes.yaml").symlink_to(ROOT / "examples" / "clusters" / "mixed.yaml")
    gpt_in_onnx(tmp_path / "model.onnx", ["batch", 64])
    (tmp_path / "graph.json").write_text(document.write(onnx_file.read(tmp_path / "model.onnx", None)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", commands())
@pytest.mark.slow
def test_a_command_of_the_pages_runs(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = command.replace("model.onnx --seq 2048", "model.onnx --seq 64")
    monkeypatch.setattr("sys.stdin", io.StringIO((folder / "nodes.yaml").read_text()))
    assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.strip()


def test_the_objects_of_the_pages_are_ours() -> None:
    readers = {"TrainingJob": training_job.parse_training_job, "GPUPool": gpu_pool.parse_gpu_pool}
    seen = set()
    for page in PAGES:
        for document in (one for text in blocks(page, "yaml") for one in yaml.safe_load_all(text)):
            if str(document.get("apiVersion", "")).startswith("tilecast.dev/"):
                readers[document["kind"]](document)
                seen.add(document["kind"])
    assert seen == set(readers)


@pytest.mark.slow
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", f"--site-dir={tmp_path}"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GPUPool.spec" in (tmp_path / "reference.html").read_text()
    assert "qwen3_moe" in (tmp_path / "model-types.html").read_text()


def test_the_list_of_models_has_every_type() -> None:
    from test_huggingface import PUBLISHED

    listed = [name for line in pages.model_types().splitlines() if line.startswith("`") for name in line.split(", ")]
    assert sorted(listed) == sorted(f"`{name}`" for name in huggingface.list_supported_types())
    page = (ROOT / "docs" / "models.md").read_text()
    assert f"the {len(PUBLISHED)} files of `tests/configs.json`" in page and f"{len(listed)} types" in page


@pytest.mark.parametrize(
    "page", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"], ids=lambda path: path.stem
)
def test_links_to_headings_lead_to_one(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text()):
        text = ((page.parent / target) if target else page).read_text()
        headings = [re.sub(r"[^\w -]", "", line).strip().lower() for line in re.findall(r"^#+ (.*)$", text, re.M)]
        assert anchor in [heading.replace(" ", "-") for heading in headings], (page.name, target, anchor)


def test_the_architecture_tells_every_module() -> None:
    names = re.findall(r"`(\w+)`", (ROOT / "docs" / "architecture.md").read_text())
    modules = {path.stem for path in (ROOT / "predictor" / "tilecast").iterdir() if path.suffix in ("", ".py")}
    assert {name for name in modules if not name.startswith("_")} <= set(names)


def test_links_lead_somewhere_in_a_clone() -> None:
    for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "charts" / "tilecast" / "README.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_worked_gpu_and_model_are_read(tmp_path: Path) -> None:
    path = tmp_path / "gpu.toml"
    path.write_text(worked("gpu"))
    assert load_gpu(path).peak("bf16") == pytest.approx(261.1e12)
    path.write_text(worked("gpu").replace("sm_count", "sm_number"))
    with pytest.raises(SpecError, match="sm_count"):
        load_gpu(path)
    ((name, table),) = tomllib.loads(worked("preset")).items()
    assert table.pop("aliases")
    assert zoo.build_model({"name": name, **table}).layers == 12


def test_every_collective_of_nccl_has_a_row_in_concepts() -> None:
    text = (ROOT / "docs" / "concepts.md").read_text()
    (rows,) = re.findall(r"^\| collective \| algorithms .*\n((?:\|.*\n)+)", text, re.M)
    first = {name.strip() for row in rows.splitlines() for name in row.split("|")[1].split(",")}
    named = {re.sub(r"[-/]", "_", name) for name in first}
    assert set(collectives.PROGRAMS.values()) <= named


def test_the_worked_collective_is_a_chain() -> None:
    space = dict(vars(collectives))
    exec(worked("collective"), space)  # noqa: S102
    sizes = np.array([2.0**20, 2.0**30])
    group = RankGroup(ranks=np.array([8.0]), local=np.array([8.0]), node_ranks=np.array([8.0]))
    seconds = space["chain_broadcast"](sizes, group, find_link("nvlink4"), find_link("infiniband-ndr-8x400"))
    assert seconds.shape == (2,)
    assert (seconds > 0).all() and seconds[1] > seconds[0]


def test_the_card_is_of_the_model_that_ships() -> None:
    page = (ROOT / "docs" / "accuracy.md").read_text()
    assert utilization.load_model().sha256 in page, "run lab/accuracy.py"


def test_the_documentation_can_be_read_in_a_day() -> None:
    """Words written by hand, tables too; code blocks and the page that `tilecast_lab support` writes do not count."""
    more = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "skills/tilecast/SKILL.md")]
    block = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
    texts = [block.sub("", page.read_text()) for page in (*PAGES, *more) if page.name != "support.md"]
    assert sum(bool(re.search("[A-Za-z]", word)) for text in texts for word in text.split()) <= 25_000
