"""Resource quantities in the notation of Kubernetes (k8s.io/apimachinery, api/resource), as whole numbers."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation, Overflow
from math import ceil

UNLIMITED = 2**31
"""Largest count. Larger ones are reduced to it."""
MOST = Decimal(2**63)
"""A number above every quantity of the API server."""
MAX_LENGTH = 64
"""Most characters of a quantity that is parsed."""


def parse_count(value: object) -> int | None:
    """Return a label value or a resource quantity as a whole number. If it is not a whole number, return None."""
    text = str(value).strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else None


def parse_size(quantity: object) -> int | None:
    """Return a Kubernetes quantity such as 81559Mi as a whole number, rounded up. If it is invalid, return None."""
    text = str(quantity).strip()
    number = _parse_decimal(text) if len(text) <= MAX_LENGTH else None
    return None if number is None or not 0 <= number < MOST else ceil(number)


def parse_gpu_count(quantity: object, default: int = 0) -> int:
    """Return the GPU count of a quantity such as 16, "16" or "1k". If it is absent or invalid, return `default`."""
    if quantity is None:
        return default
    number = _parse_decimal(str(quantity).strip())
    return default if number is None else min(int(number), UNLIMITED)


def _parse_decimal(text: str) -> Decimal | None:
    """Return a quantity as a decimal number, capped at `MOST`. If the text is not a quantity, return None."""
    scale = _SUFFIXES.get(text[-2:], _SUFFIXES.get(text[-1:]))
    digits = text if scale is None else text.rstrip("kMGTPEim")
    try:
        number = Decimal(digits) * (scale or 1)
    except Overflow:
        return MOST
    except (InvalidOperation, ValueError):
        return None
    # A value with an exponent of a few digits could expand to gigabytes of digits.
    return max(min(number, MOST), -MOST) if number.is_finite() else None


_SUFFIXES = {"m": Decimal("0.001"), "k": Decimal(1000)} | {
    name: Decimal(base ** (power + 1))
    for base, suffixes in ((1000, ("", "M", "G", "T", "P", "E")), (1024, ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")))
    for power, name in enumerate(suffixes)
    if name
}
