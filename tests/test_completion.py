"""Completion: each shell has one script, with which bash completes verbs, options and presets."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tilecast.cli import VERBS, main


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        capture = pytest.MonkeyPatch()
        with capture.context() as patch, (folder / shell).open("w") as out:
            patch.setattr("sys.stdout", out)
            assert main(["completion", shell]) == 0
    return folder


COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
$(complete -p tilecast | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["adv"], {"advise"}),
        ([""], set(VERBS)),
        (["advise", "llama-3.1-8"], {"llama-3.1-8b"}),
        (["advise", "gpt2", "--ba"], {"--batch", "--baseline"}),
        (["advise", "gpt2", "--launch", "mega"], {"megatron"}),
        (["validate", "col"], {"collectives"}),
        (["show", "poo"], {"pools"}),
        (["advise", "gpt2", "--gpus", "h100-s"], {"h100-sxm"}),
        (["advise", "gpt2", "--gpus", "h100-pcie,p5.48"], {"h100-pcie,p5.48xlarge"}),
        (["fits", "gpt2", "--link", "infiniband-n"], {"infiniband-ndr-4x400", "infiniband-ndr-8x400"}),
        (["show", "gpus", "h200-n"], {"h200-nvl"}),
        (["advise", "gpt2", "--check"], {"--checkpointing"}),
        (["advise", "gpt2", "--nodes", "clu"], {"cluster.yaml"}),
        (["advise", "gpt2", "--objective", "co"], {"cost"}),
        (["advise", "gpt2", "--plan", "t"], {"tp="}),
        (["advise", "gpt2", "--qui"], {"--quiet"}),
        (["queue", "jobs.yaml", "--policy", "ma"], {"makespan"}),
        (["sweep", "gpt2", "--over", "pool.g"], {"pool.gpus="}),
    ],
)
def test_bash_completes(scripts: Path, words: list[str], expected: set[str], tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    (tmp_path / "cluster.yaml").touch()
    command = [bash, "--norc", "-c", COMPLETE, "bash", str(scripts / "bash"), "tilecast", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert expected <= set(done.stdout.split()), done.stderr


ON_ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "PS1=; fpath=($1 \$fpath); autoload -Uz compinit; compinit -u -D; echo READ''Y"
while zpty -r shell line; do [[ $line == *READY* ]] && break; done
zpty -w -n shell "$2"$'\t'
zpty -w shell $'\x01: \x05; echo DON\'\'E'
while zpty -r shell line; do print -r -- "$line"; [[ $line == *DONE* ]] && break; done
zpty -d shell
"""
"""Script that types a line and a tabulator in an interactive zsh, and then turns the line into a comment."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("advise gpt2 --gpus h100-pcie,p5.48", "h100-pcie,p5.48xlarge"),
        ("advise gpt2 --baseline h200-n", "h200-nvl"),
        ("advise gpt2 --nodes clu", "cluster.yaml"),
        ("advise gpt2 --launch mega", "megatron"),
        ("advise gpt2 --plan cp=2,t", "cp=2,tp="),
        ("advise gpt2 --objective co", "cost"),
        ("queue jobs.yaml --policy ma", "makespan"),
        ("sweep gpt2 --over pool.g", "pool.gpus="),
    ],
)
def test_zsh_completes(scripts: Path, line: str, expected: str, tmp_path: Path) -> None:
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("needs zsh")
    (tmp_path / "_tilecast").write_text((scripts / "zsh").read_text())
    (tmp_path / "cluster.yaml").touch()
    (tmp_path / "type").write_text(ON_ZSH)
    command = [zsh, "-f", str(tmp_path / "type"), str(tmp_path), f"tilecast {line}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "command not found" not in done.stdout
    assert f" {expected} " in re.sub(r"\x1b\[[\d;?]*\w", "", done.stdout).replace("\r", " "), done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one(scripts: Path, shell: str) -> None:
    text = (scripts / shell).read_text()
    for word in ("advise", "sweep", "llama-3.1-8b", "launch"):
        assert word in text
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"needs {shell}")
    subprocess.run([program, "-n", str(scripts / shell)], check=True)
