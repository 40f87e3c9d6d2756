"""The licences of what the image holds: `python tools/licences.py` prints a table of every locked package.

They come from the metadata that the packages install, so that the environment must hold what the lock names.
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
"""Characters; a longer licence field holds the licence's text, and the classifiers name it."""
_CLASSIFIER = "License :: OSI Approved :: "


class Package(NamedTuple):
    """A package of the lock file, its version and its licence; the licence is empty where it names none."""

    name: str
    version: str
    licence: str
    home: str


def packages(lock: Path = LOCK) -> Iterator[Package]:
    """Every package of a lock file that is installed here; one for another system or Python is not."""
    for name, version in re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", lock.read_text(encoding="utf-8"), re.MULTILINE):
        try:
            fields = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue
        if fields["Version"] != version:  # another Python's
            continue
        yield Package(name, version, _licence(fields), _home(fields))


def write(stream: TextIO) -> None:
    """The table as CSV."""
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
