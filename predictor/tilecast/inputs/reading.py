"""Read files and standard input, and parse values of flags such as durations, amounts, and names with counts."""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

from tilecast.spec import SpecError


class InputWarning(UserWarning):
    """A warning that something in an input is ignored or assumed."""


def parse_seconds(text: str, flag: str = "--deadline") -> int:
    """Parse a duration such as `5400`, `90min`, `36h` or `14d` into whole seconds. Errors name `flag`.

    Raises:
        SpecError: the text has another form.
    """
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,3})?) *(s|min|h|d|w|)", text.strip(), re.ASCII)
    if match is None:
        raise SpecError(flag, f"cannot read {text!r}", "write seconds, or for instance 90min, 36h or 14d")
    return int(float(match[1]) * {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800}[match[2]])


def parse_deadline(text: str, flag: str = "--deadline") -> int:
    """Parse the time that a run may take, or the date and time by which it must end, into whole seconds from now.

    A date means its first moment. A time without an offset such as `+02:00` is in UTC. Errors name `flag`.

    Raises:
        SpecError: the text has another form, or the date has passed.
    """
    if re.match(r"\d{4}-\d\d-\d\d", text.strip(), re.ASCII) is None:
        return parse_seconds(text, flag)
    try:
        end = datetime.fromisoformat(text.strip())
    except ValueError:
        remedy = "write a date as 2026-12-01 or 2026-12-01T18:00"
        raise SpecError(flag, f"cannot read {text[:40]!r}", remedy) from None
    left = (end if end.tzinfo else end.replace(tzinfo=UTC)) - datetime.now(UTC)
    if left.total_seconds() < 1:
        raise SpecError(flag, f"{text[:40]} has passed", "give a later date, or how long the run may take")
    return int(left.total_seconds())


def parse_amount(value: str, flag: str = "--budget") -> dict[str, Any]:
    """Parse an amount of money, such as `5000` or `5000 EUR`, into `amount` and `currency`. The default is USD.

    Raises:
        SpecError: the text has another form.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,4})?) *([A-Z]{3})?", value.strip(), re.ASCII)
    if match is None:
        raise SpecError(flag, f"cannot read {value!r}", "write an amount, with a currency if it is not USD: 5000EUR")
    return {"amount": float(match[1]), "currency": match[2] or "USD"}


_THOUSANDS: Mapping[str, int] = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3, "t": 4}
"""Power of a thousand for each suffix: kilo, mega, giga or billion, tera or trillion."""
_COUNT = r"(\d[\d_]{0,17}(?:\.\d{1,9})?(?:e\d{1,2})?) *([kmgbt]?)"
"""Pattern of a number with an optional suffix, in lower case."""


def parse_count(text: str, flag: str, kilo: int = 1000) -> int:
    """Parse a whole number such as `4096`, `8k`, `1.5M`, `15T` or `1e12`. Errors name `flag`.

    Args:
        text: the number.
        flag: name of the number in errors.
        kilo: value of the suffix k, 1000 or 1024. M, G (or B) and T are its powers.

    Raises:
        SpecError: the text has another form, or is not a whole number.
    """
    match = re.fullmatch(_COUNT, text.strip().lower(), re.ASCII)
    number = Fraction(match[1]) * kilo ** _THOUSANDS[match[2]] if match else Fraction(1, 2)
    if number.denominator != 1:
        raise SpecError(flag, f"cannot read {text[:40]!r}", "write a whole number, for instance 64, 8k or 1.5M")
    return int(number)


def parse_batch(text: str, flag: str, sequence: int | None) -> int:
    """Parse a global batch, such as `512`, `2k` or `4Mtokens`, into a number of samples.

    A number of tokens is divided by the sequence length. Its suffix means a power of 1024, or of 1000 if only that
    gives whole samples. If a sequence length is given, millions without a unit are read as tokens, because no step has
    so many samples. A warning says so.

    Args:
        text: the batch.
        flag: name of the batch in errors.
        sequence: tokens per sample, or None if unknown.

    Raises:
        SpecError: the text has another form, or the tokens are not a whole number of samples.
    """
    match = re.fullmatch(rf"{_COUNT} *(tok|tokens?)?", text.strip().lower(), re.ASCII)
    if match is None:
        raise SpecError(flag, f"cannot read {text[:40]!r}", "write samples, for instance 128 or 4k, or 4Mtokens")
    if not match[3] and (match[2] in ("", "k") or sequence is None):
        return parse_count(text, flag, 1024)
    if sequence is None:
        raise SpecError(flag, f"{text[:40]!r} counts tokens of samples of unknown length", "add --seq")
    for kilo in (1024, 1000):
        samples = Fraction(match[1]) * kilo ** _THOUSANDS[match[2]] / max(sequence, 1)
        if samples.denominator == 1:
            break
    else:
        nearest = max(round(samples), 1)
        problem = f"{text[:40]!r} is no whole number of samples of {sequence} tokens"
        raise SpecError(flag, problem, f"write samples, for instance {nearest}")
    if not match[3]:
        text = f"{flag} {text} is read as tokens: {int(samples)} samples of {sequence}; write {text}tokens to say so"
        warnings.warn(text, InputWarning, stacklevel=2)
    return int(samples)


def parse_number(text: str, flag: str) -> float:
    """Parse a number such as `0.5` or `6000`. Errors name `flag`.

    Raises:
        SpecError: the text has another form.
    """
    if re.fullmatch(r"\d{1,15}(?:\.\d{0,15})?(?:e-?\d{1,2})?", text.strip().lower(), re.ASCII) is None:
        raise SpecError(flag, f"cannot read {text[:40]!r}", "write a number, for instance 0.5 or 6000")
    return float(text)


def parse_range(text: str, flag: str) -> dict[str, int]:
    """Parse a range of global batches such as `256..1k` into `min` and `max`. Errors name `flag`.

    Raises:
        SpecError: the text has another form.
    """
    low, dots, high = text.partition("..")
    if not dots:
        raise SpecError(flag, f"cannot read {text[:40]!r}", "write MIN..MAX, for instance 256..1024")
    return {"min": parse_count(low, flag, 1024), "max": parse_count(high, flag, 1024)}


def parse_name_and_count(flag: str, text: str) -> tuple[str, int]:
    """Parse `NAME:COUNT`, or `NAME:NODESxGPUS`, into a name and a count. Errors name `flag`.

    Raises:
        SpecError: the text has another form.
    """
    name, colon, count = text.strip().partition(":")
    factors = count.split("x")
    is_read = name and colon and len(factors) <= 2 and all(part.isdecimal() and len(part) <= 7 for part in factors)
    total = math.prod(map(int, factors)) if is_read else 0
    if not 0 < total <= 2**20:
        raise SpecError(flag, f"cannot read {text!r}", "write NAME:COUNT, for instance h100-sxm:16")
    return name, total


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
        problem = f"cannot be read: {error.strerror or error}"
        raise SpecError(name, problem, "check the path and the rights of the file") from None
    except UnicodeDecodeError:
        raise SpecError(name, "is not UTF-8 text", "give YAML or JSON") from None


def to_flag(name: str) -> str:
    """Return the command-line flag for an option's name: `lora_rank` becomes `--lora-rank`."""
    return f"--{name.replace('_', '-')}"


def is_file_argument(job: str) -> bool:
    """Return whether an argument is a dash, ends like YAML and JSON files, or is the path of an existing file."""
    return job == "-" or job.endswith((".yaml", ".yml", ".json")) or os.path.isfile(job)  # noqa: PTH113 (never raises)


def get_metadata_name(document: Mapping[str, object]) -> str:
    """Return `metadata.name` of a document, or an empty string if the document has no metadata."""
    metadata = document.get("metadata")
    return str(metadata.get("name")) if isinstance(metadata, Mapping) else ""
