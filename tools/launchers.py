"""Run a program in an environment that has the launchers' own packages, in the cache of `binaries.py`.

    python tools/launchers.py            # prints its Python, made on first use (3 minutes, 6 GB)
    python tools/launchers.py pytest tests/test_launch_parsers.py

`requirements-launchers.lock` is installed, by version and hash, into an environment of Python 3.12, or of this Python
where there is no 3.12. What runs there gets `TILECAST_REQUIRE=launchers`, with which a skip is a failure.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import binaries
from required import VARIABLE

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements-launchers.lock"
INSTALLER = ROOT / "requirements-uv.lock"
WANTED = "3.12"
"""Version of Python that the current packages of some launchers want."""
NOWHERE = "http://127.0.0.1:9"
"""A proxy that does not answer, so that nothing is fetched."""


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


def _run(*command: str | Path) -> str:
    """Return what a command wrote to standard error, which is empty if it succeeded."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    return (done.stderr.strip()[-1000:] or f"exit status {done.returncode}") if done.returncode else ""


def ensure() -> Path:
    """Return the environment's Python, installing it first if it is missing. Safe to call from several processes.

    Raises:
        LaunchersError: it cannot be installed.
    """
    program, version = find_python()
    digest = hashlib.sha256(LOCK.read_bytes() + INSTALLER.read_bytes() + version.encode()).hexdigest()[:16]
    folder = binaries.cache_folder() / f"launchers-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    python = folder / "bin" / "python"
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "whole").exists():
            return python
        binaries.say("installing the launchers' packages, with torch: about 3 minutes and 6 GB the first time")
        shutil.rmtree(folder, ignore_errors=True)
        hashes = ("--quiet", "--require-hashes")
        pip = (python, "-m", "pip", "install", *hashes, "--disable-pip-version-check", "--no-compile")
        if error := _run(program, "-m", "venv", folder) or _run(*pip, "-r", INSTALLER):
            raise LaunchersError(f"the launchers' packages cannot be installed: {error}")
        # uv takes a fifth of pip's processor time. Where only pip is told of a mirror, pip installs.
        uv = (folder / "bin" / "uv", "pip", "install", *hashes, "--no-cache", "--python", python, "--link-mode", "copy")
        error = _run(*uv, "-r", LOCK)
        if error and (second := _run(*pip, "-r", LOCK)):
            raise LaunchersError(f"the launchers' packages cannot be installed: {second}")
        (folder / "whole").touch()
    return python


def environment() -> dict[str, str]:
    """Return the variables of a program that runs there: nothing skipped, nothing fetched, no GPU, this source tree."""
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE)
    # Bytecode is written once, also where a container's image switches that off: uv writes none.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept, **proxies, VARIABLE: "launchers", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled",
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
