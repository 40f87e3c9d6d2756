"""Read files and standard input, and parse values of flags: durations, amounts, names with counts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilecast.spec import SpecError


class InputWarning(UserWarning):
    """A warning that something in an input is ignored or assumed."""


def parse_seconds(text: str, flag: str = "--deadline") -> int:
    """Parse a duration such as `5400`, `90min`, `36h` or `14d` into whole seconds. Errors name `flag`.

    Raises:
        SpecError: the text is something else.
    """
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,3})?) *(s|min|h|d|)", text.strip(), re.ASCII)
    if match is None:
        raise SpecError(flag, f"cannot read {text!r}", "write seconds, or for instance 90min, 36h or 14d")
    return int(float(match[1]) * {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}[match[2]])


def parse_amount(text: str) -> dict[str, Any]:
    """Parse an amount of money, such as `5000` or `5000 EUR`, into `amount` and `currency`. The default is USD.

    Raises:
        SpecError: the text is something else.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,4})?) *([A-Z]{3})?", text.strip(), re.ASCII)
    if match is None:
        raise SpecError(
            "--budget", f"cannot read {text!r}", "write an amount, with a currency if it is not USD: 5000EUR"
        )
    return {"amount": float(match[1]), "currency": match[2] or "USD"}


def parse_name_and_count(flag: str, text: str) -> tuple[str, int]:
    """Parse `NAME:COUNT` into a name and a count. Errors name `flag`.

    Raises:
        SpecError: the text is something else.
    """
    name, colon, count = text.strip().partition(":")
    if not (name and colon and count.isdecimal() and len(count) <= 7 and 0 < int(count) <= 2**20):
        raise SpecError(flag, f"cannot read {text!r}", "write NAME:COUNT, for instance h100-sxm:16")
    return name, int(count)


def read_text(name: str) -> str:
    """Return the text of a file. If the name is a dash, return the text of standard input.

    Raises:
        SpecError: the input cannot be read, or is not UTF-8 text.
    """
    try:
        if name == "-" and sys.stdin is None:
            raise SpecError("-", "there is no standard input", "name a file")
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(name, "cannot be read", str(error.strerror or error)) from None
    except UnicodeDecodeError:
        raise SpecError(name, "is not UTF-8 text", "give YAML or JSON") from None


def to_flag(name: str) -> str:
    """Return the command-line flag for an option's name: `lora_rank` becomes `--lora-rank`."""
    return f"--{name.replace('_', '-')}"


def means_file(job: str) -> bool:
    """Return whether an argument is a dash, ends as YAML and JSON files do, or is the path of an existing file."""
    return job == "-" or job.endswith((".yaml", ".yml", ".json")) or os.path.isfile(job)  # noqa: PTH113 (never raises)


def metadata_name(document: Mapping[str, object]) -> str:
    """Return `metadata.name` of a document, or an empty string if the document has no metadata."""
    metadata = document.get("metadata")
    return str(metadata.get("name")) if isinstance(metadata, Mapping) else ""
