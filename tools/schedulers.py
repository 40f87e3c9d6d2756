"""Install Ray and SkyPilot in an environment of their own, in the cache of `binaries.py`, to check dialects with them.

    python tools/schedulers.py            # prints its Python, made on first use (2 minutes, 700 MB)

`requirements-schedulers.lock` is installed, by version and hash, wheels only. Neither program is started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import binaries
import environments

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements-schedulers.lock"


class SchedulersError(Exception):
    """Ray and SkyPilot can be neither installed nor asked; the message is what the failing program said."""


def ensure() -> Path:
    """Return the environment's Python, installing it first if it is missing. Safe to call from several processes.

    Raises:
        SchedulersError: it cannot be installed.
    """
    message = "installing Ray and SkyPilot in an environment of their own: about 2 minutes the first time"
    return environments.ensure("schedulers", (LOCK,), message, _install) / "bin" / "python"


def _install(folder: Path) -> None:
    if error := environments.install_wheels(folder, LOCK):
        raise SchedulersError(f"Ray and SkyPilot cannot be installed: {error}")


def check(request: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """Return the answer of `scheduler_checks.py` to a request.

    Args:
        request: texts of the dialects, and products; see there.
        home: an empty folder, which SkyPilot takes for the user's.

    Raises:
        SchedulersError: the environment cannot be installed, or the program fails.
    """
    command = [str(ensure()), str(Path(__file__).with_name("scheduler_checks.py"))]
    environment = {**os.environ, **environments.off_line(), "HOME": str(home), "PYTHONPATH": ""}
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
