"""Completion: each shell has one script, with which bash completes verbs, options and presets."""

from __future__ import annotations

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
    ],
)
def test_bash_completes(scripts: Path, words: list[str], expected: set[str], tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    command = [bash, "--norc", "-c", COMPLETE, "bash", str(scripts / "bash"), "tilecast", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert expected <= set(done.stdout.split()), done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one(scripts: Path, shell: str) -> None:
    text = (scripts / shell).read_text()
    for word in ("advise", "sweep", "llama-3.1-8b", "launch"):
        assert word in text
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"needs {shell}")
    subprocess.run([program, "-n", str(scripts / shell)], check=True)
