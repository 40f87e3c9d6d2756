"""Run checkov in its own environment, in the cache of `binaries.py`, so that its hundred packages stay separate.

    python tools/checkov.py              # prints its path, made on first use (3 minutes)

`requirements-checkov.lock` is installed, by version and hash, wheels only. checkov runs off-line: it downloads no
policies, and its proxies are set to an address that does not answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import binaries
import environments

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements-checkov.lock"


class CheckovError(Exception):
    """checkov can be neither installed nor run; the message is what the failing program said."""


class Finding(NamedTuple):
    """One failed check."""

    check: str
    resource: str


def ensure() -> Path:
    """Return the program, installing it first if it is missing. Safe to call from several processes at once.

    Raises:
        CheckovError: it cannot be installed.
    """
    message = "installing checkov in an environment of its own: about 3 minutes the first time"
    return environments.ensure("checkov", (LOCK,), message, _install) / "bin" / "checkov"


def _install(folder: Path) -> None:
    if error := environments.install_wheels(folder, LOCK):
        raise CheckovError(f"checkov cannot be installed: {error}")


def findings(file: Path, framework: str) -> list[Finding]:
    """Return the checks that a file fails, off-line.

    Args:
        file: rendered manifests, or a Dockerfile.
        framework: `kubernetes` or `dockerfile`.

    Raises:
        CheckovError: checkov cannot be installed, or did not check anything.
    """
    options = ("--quiet", "--compact", "--skip-download", "--output=json", f"--framework={framework}")
    command = [str(ensure()), f"--file={file}", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=file.parent, env=_off_line())
    try:
        report = json.loads(done.stdout)
        if not report["summary"]["passed"] or report["summary"]["parsing_errors"]:
            raise ValueError("nothing was checked")
        return [Finding(item["check_id"], item["resource"]) for item in report["results"]["failed_checks"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckovError(f"checkov: {error}: {done.stderr.strip()[-1000:]}") from None


def _off_line() -> dict[str, str]:
    return os.environ | environments.off_line() | {"NO_PROXY": "", "no_proxy": ""}


def main() -> int:
    """Install checkov and print its path."""
    try:
        print(ensure())
    except CheckovError as error:
        binaries.say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
