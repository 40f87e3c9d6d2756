"""Resource quantities as Kubernetes writes them (k8s.io/apimachinery, api/resource), as whole numbers."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation, Overflow
from math import ceil

UNLIMITED = 2**31
"""What a larger quantity counts as."""
MOST = Decimal(2**63)
"""Above every quantity of the API server."""
MAX_LENGTH = 64
"""Characters of a quantity that is read."""


def count(value: object) -> int | None:
    """A whole number from a label or a resource quantity; None where it is none."""
    text = str(value).strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else None


def size(quantity: object) -> int | None:
    """Return a quantity of bytes or pieces, such as 81559Mi, rounded up; None where it is none."""
    text = str(quantity).strip()
    number = _number(text) if len(text) <= MAX_LENGTH else None
    return None if number is None or not 0 <= number < MOST else ceil(number)


def whole(quantity: object, absent: int = 0) -> int:
    """A count of GPUs from a quantity, which may be written 16, "16" or "1k"."""
    if quantity is None:
        return absent
    number = _number(str(quantity).strip())
    return absent if number is None else min(int(number), UNLIMITED)


def _number(text: str) -> Decimal | None:
    """Return the number that a quantity stands for, `MOST` for a larger one; None where it is none."""
    scale = _SUFFIXES.get(text[-2:], _SUFFIXES.get(text[-1:]))
    digits = text if scale is None else text.rstrip("kMGTPEim")
    try:
        number = Decimal(digits) * (scale or 1)
    except Overflow:
        return MOST
    except (InvalidOperation, ValueError):
        return None
    # An exponent of a few digits is a number of gigabytes of digits.
    return max(min(number, MOST), -MOST) if number.is_finite() else None


_SUFFIXES = {"m": Decimal("0.001"), "k": Decimal(1000)} | {
    name: Decimal(base ** (power + 1))
    for base, suffixes in ((1000, ("", "M", "G", "T", "P", "E")), (1024, ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")))
    for power, name in enumerate(suffixes)
    if name
}
