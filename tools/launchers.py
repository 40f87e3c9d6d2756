"""Run a program in an environment that has the launchers' own packages, in the cache of `binaries.py`.

    python tools/launchers.py            # prints its Python, made on first use (3 minutes, 6 GB)
    python tools/launchers.py pytest tests/test_launch_parsers.py

`requirements-launchers.lock` is installed, by version and hash, into an environment of Python 3.12, or of this Python
where there is no 3.12. What runs there gets `TILECAST_REQUIRE=launchers`, with which a skip is a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import binaries
import environments
from required import VARIABLE

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements-launchers.lock"
INSTALLER = ROOT / "requirements-uv.lock"
WANTED = "3.12"
"""Version of Python that the current packages of some launchers want."""


class LaunchersError(Exception):
    """The launchers' packages cannot be installed; the message is what the failing program said."""


def _pythons() -> Iterator[str]:
    """Yield programs that may be a Python of the wanted version, this one last."""
    if found := shutil.which(f"python{WANTED}"):
        yield found
    kept = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
    yield from map(str, sorted(kept.glob(f"{WANTED}.*/bin/python{WANTED}"), reverse=True))
    yield sys.executable


def find_python() -> tuple[str, str]:
    """Return the first Python that starts, with its version in full."""
    for program in _pythons():
        command = [program, "-c", "import ensurepip, sys, venv; print(sys.version)"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return program, done.stdout
    return sys.executable, sys.version


def ensure() -> Path:
    """Return the environment's Python, installing it first if it is missing. Safe to call from several processes.

    Raises:
        LaunchersError: it cannot be installed.
    """
    program, version = find_python()
    message = "installing the launchers' packages, with torch: about 3 minutes and 6 GB the first time"
    install = partial(_install, program)
    return environments.ensure("launchers", (LOCK, INSTALLER), message, install, version) / "bin" / "python"


def _install(program: str, folder: Path) -> None:
    python, run = folder / "bin" / "python", environments.run
    hashes = ("--quiet", "--require-hashes")
    pip = (python, "-m", "pip", "install", *hashes, "--disable-pip-version-check", "--no-compile")
    error = run((program, "-m", "venv", folder)) or run((*pip, "-r", INSTALLER))
    if not error:
        # uv takes a fifth of pip's processor time. Where only pip is told of a mirror, pip installs.
        uv = (folder / "bin" / "uv", "pip", "install", *hashes, "--no-cache", "--python", python, "--link-mode", "copy")
        error = run((*uv, "-r", LOCK)) and run((*pip, "-r", LOCK))
    if error:
        raise LaunchersError(f"the launchers' packages cannot be installed: {error}")


def environment() -> dict[str, str]:
    """Return the variables of a program that runs there: nothing skipped, nothing fetched, no GPU, this source tree."""
    # Bytecode is written once, also where a container's image switches that off: uv writes none.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept, **environments.off_line(), VARIABLE: "launchers", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled",
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("predictor", "operator", "lab")),
    }  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Install the environment, and run a module in it or print its Python."""
    try:
        python = ensure()
    except LaunchersError as error:
        binaries.say(f"error: {error}")
        return 1
    if not words:
        print(python)
        return 0
    return subprocess.run([str(python), "-m", *words], check=False, env=environment()).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
