"""A copy of the repository that tests add to, and programs that run in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

import processes

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("charts", "crds", "docs", "examples", "lab", "operator", "predictor", "schemas", "tests", "tools")
FILES = ("README.md", "pyproject.toml")


class RepositoryCopy:
    """A copy of what programs and tests read. `package` is the folder of the predictor's package in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = folder / "predictor" / "tilecast"
        for name in FOLDERS:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "releases"))
        for name in FILES:
            shutil.copy(ROOT / name, folder)

    def change(self, path: str, old: str, new: str) -> None:
        """Replace the only occurrence of a text in a file of the package."""
        file = self.package / path
        text = file.read_text()
        assert text.count(old) == 1, (path, old)
        file.write_text(text.replace(old, new))

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run Python in the copy."""
        path = os.pathsep.join(str(self.folder / name) for name in ("lab", "operator", "predictor"))
        environment = {name: value for name, value in os.environ.items() if name != processes.MARK}
        return subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            check=False,
            env=environment | {"PYTHONPATH": path, "COLUMNS": "200"},
            cwd=self.folder,
        )

    def output(self, *command: str) -> str:
        """Run Python in the copy, and return what it prints; fail if it fails."""
        done = self.run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def tilecast(self, *arguments: str) -> str:
        return self.output("-m", "tilecast", *arguments)

    def python(self, program: str) -> str:
        return self.output("-c", program).strip()

    def generate(self) -> None:
        """Write what `make crds` writes."""
        self.output("tools/job_kinds.py")
        self.output("-m", "tilecast.api.crds", "--output-dir", "crds", "--output-dir", "charts/tilecast/crds")

    def read(self, path: str) -> str:
        return (self.folder / path).read_text()

    def write(self, name: str, document: object) -> str:
        path = self.folder / name
        path.write_text(json.dumps(document) if name.endswith(".json") else yaml.safe_dump(document, sort_keys=False))
        return str(path)
