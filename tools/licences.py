"""Licences of the packages in the image: `python tools/licences.py` prints a table of every locked package.

They come from the metadata of installed packages, so the environment must have the packages of the lock file.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, TextIO

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements-operator.lock"
LONGEST = 60
"""Most characters of a licence field that is used.

A longer field holds the licence's text, and the classifiers name the licence.
"""
_CLASSIFIER = "License :: OSI Approved :: "


class Package(NamedTuple):
    """A package of the lock file, its version and its licence; the licence is empty if the package names none."""

    name: str
    version: str
    licence: str
    home: str


def packages(lock: Path = LOCK) -> Iterator[Package]:
    """Yield every package of a lock file that is installed here; those for another system or Python are not."""
    for name, version in re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", lock.read_text(encoding="utf-8"), re.MULTILINE):
        try:
            fields = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue
        if fields["Version"] != version:  # locked for another Python
            continue
        yield Package(name, version, _licence(fields), _home(fields))


def write(stream: TextIO) -> None:
    """Write the table as CSV."""
    table = csv.writer(stream, lineterminator="\n")
    table.writerow(Package._fields)
    table.writerows(sorted(packages()))


def _licence(fields: metadata.PackageMetadata) -> str:
    expression, text = _field(fields, "License-Expression"), _field(fields, "License").strip()
    if expression or (text and len(text) <= LONGEST and "\n" not in text):
        return expression or text
    named = [item.removeprefix(_CLASSIFIER) for item in fields.get_all("Classifier") or () if _CLASSIFIER in item]
    return " AND ".join(named) or text.partition("\n")[0].strip()


def _field(fields: metadata.PackageMetadata, name: str) -> str:
    return str(fields[name] or "") if name in fields else ""


def _home(fields: metadata.PackageMetadata) -> str:
    urls = dict(item.split(", ", 1) for item in fields.get_all("Project-URL") or () if ", " in item)
    known = {name.lower(): url for name, url in urls.items()}
    return _field(fields, "Home-page") or next(
        (known[name] for name in ("homepage", "repository", "source", "source code", "github") if name in known), ""
    )


if __name__ == "__main__":
    write(sys.stdout)
