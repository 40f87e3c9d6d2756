"""The README shows what the programs print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tilecast.cli import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_first_screen_is_what_the_demo_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["advise", "examples/jobs/llama-7b-pretrain.yaml", "--nodes", "examples/clusters/mixed.yaml"]) == 0
    assert capsys.readouterr().out.rstrip() in README


def test_the_job_in_the_readme_is_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = blocks("yaml")
    path = tmp_path / "job.yaml"
    path.write_text(job)
    assert main(["advise", str(path), "--gpus", "h100-sxm:8", "-o", "csv"]) == 0
    assert "h100-sxm" in capsys.readouterr().out


def test_every_option_in_the_readme_exists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["advise", "--help"])
    known = capsys.readouterr().out
    for line in "\n".join(blocks("sh")).splitlines():
        if "tilecast advise" in line:
            for option in re.findall(r" (--[a-z-]+)", line.split("tilecast advise")[1]):
                assert option in known, option
