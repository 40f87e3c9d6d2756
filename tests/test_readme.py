"""The README shows the actual output of the programs, and the first objects that a user writes are accepted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from tilecast.cli import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str, page: str = "README.md") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_first_screen_is_what_the_demo_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["advise", "examples/jobs/llama-7b-pretrain.yaml", "--nodes", "examples/clusters/mixed.yaml"]) == 0
    assert capsys.readouterr().out.rstrip() in README


def test_the_job_of_the_start_page_is_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = (text for text in blocks("yaml", "docs/index.md") if "kind: TrainingJob" in text)
    path = tmp_path / "job.yaml"
    path.write_text(job)
    assert main(["advise", str(path), "--gpus", "h100-sxm:8", "-o", "csv"]) == 0
    assert "h100-sxm" in capsys.readouterr().out


@pytest.mark.slow
def test_the_pool_of_the_command_line_takes_a_measured_link(tmp_path: Path) -> None:
    (pool,) = (text for text in blocks("yaml", "docs/cli.md") if "kind: GPUPool" in text)
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text((ROOT / "examples/clusters/mixed.yaml").read_text() + "\n---\n" + pool)
    links = tmp_path / "links"
    links.mkdir()
    shipped = files("tilecast.hardware").joinpath("links", "nvlink3.toml").read_text()
    (links / "ours.toml").write_text(shipped.replace('name = "nvlink3"', 'name = "ours"'))
    arguments = ["advise", "llama-2-7b", "--seq", "4096", "--batch", "64", "--nodes", str(nodes)]
    code = f"from tilecast.cli import main; main({arguments!r})"
    environment = os.environ | {"TILECAST_LINKS": str(links)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "a100-80" in done.stdout
    environment = {key: value for key, value in environment.items() if key != "TILECAST_LINKS"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "ours" in done.stdout + done.stderr


def test_every_option_in_the_readme_exists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["advise", "--help"])
    known = capsys.readouterr().out
    for line in "\n".join(blocks("sh")).splitlines():
        if "tilecast advise" in line:
            for option in re.findall(r" (--[a-z-]+)", line.split("tilecast advise")[1]):
                assert option in known, option
