"""Install Ray and SkyPilot in an environment of their own, in the cache of `binaries.py`, to check dialects with them.

    python tools/schedulers.py            # prints its Python, made on first use (2 minutes, 700 MB)

`requirements-schedulers.lock` is installed, by version and hash, wheels only. Neither program is started.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import binaries

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements-schedulers.lock"
NOWHERE = "http://127.0.0.1:9"


class SchedulersError(Exception):
    """Ray and SkyPilot can be neither installed nor asked; the message is what the failing program said."""


def ensure() -> Path:
    """Return the environment's Python, installing it first if it is missing. Safe to call from several processes.

    Raises:
        SchedulersError: it cannot be installed.
    """
    digest = hashlib.sha256(LOCK.read_bytes() + sys.version.encode()).hexdigest()[:16]
    folder = binaries.cache_folder() / f"schedulers-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    python = folder / "bin" / "python"
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "whole").exists():
            return python
        binaries.say("installing Ray and SkyPilot in an environment of their own: about 2 minutes the first time")
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        options = ("--quiet", "--disable-pip-version-check", "--require-hashes", "--only-binary", ":all:")
        command = [str(python), "-m", "pip", "install", *options, "-r", str(LOCK)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SchedulersError(f"Ray and SkyPilot cannot be installed: {done.stderr.strip()[-1000:]}")
        (folder / "whole").touch()
    return python


def check(request: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """Return the answer of `scheduler_checks.py` to a request.

    Args:
        request: texts of the dialects, and products; see there.
        home: an empty folder, which SkyPilot takes for the user's.

    Raises:
        SchedulersError: the environment cannot be installed, or the program fails.
    """
    command = [str(ensure()), str(Path(__file__).with_name("scheduler_checks.py"))]
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE)
    environment = {**os.environ, **proxies, "HOME": str(home), "PYTHONPATH": ""}
    text = json.dumps(request)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SchedulersError(done.stderr.strip()[-1000:])
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> int:
    """Install the environment and print its Python."""
    try:
        print(ensure())
    except SchedulersError as error:
        binaries.say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
