"""The page of worked answers: every command recommends what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tilecast.cli import main

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "answers.md").read_text()
ANSWERS = re.findall(r"```sh\ntilecast (.+)\n```\n\n```text\n(.+)\n```", PAGE)


def test_the_page_has_five_answers() -> None:
    assert len(ANSWERS) == PAGE.count("\n## ") == PAGE.count("```sh") == 5


@pytest.mark.slow
@pytest.mark.parametrize(("command", "row"), ANSWERS, ids=[command.split()[1] for command, _ in ANSWERS])
def test_a_command_recommends_what_the_page_says(command: str, row: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 0
    (shown,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(">  ")]
    assert shown.split()[:4] == row.split()
