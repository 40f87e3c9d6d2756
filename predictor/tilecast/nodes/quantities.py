"""Resource quantities in the notation of Kubernetes (k8s.io/apimachinery, api/resource), as whole numbers."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation, Overflow
from math import ceil

UNLIMITED = 2**31
"""Number that larger counts are cut to."""
MOST = Decimal(2**63)
"""Number that is above every quantity of the API server."""
MAX_LENGTH = 64
"""Most characters of a quantity that is read."""


def parse_count(value: object) -> int | None:
    """Return the whole number in a label or a resource quantity; None if it is not one."""
    text = str(value).strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else None


def parse_size(quantity: object) -> int | None:
    """Return a quantity of bytes or pieces, such as 81559Mi, rounded up; None if the text is no such quantity."""
    text = str(quantity).strip()
    number = _parse_decimal(text) if len(text) <= MAX_LENGTH else None
    return None if number is None or not 0 <= number < MOST else ceil(number)


def parse_gpu_count(quantity: object, absent: int = 0) -> int:
    """Return a count of GPUs from a quantity, which may be written 16, "16" or "1k"; `absent` if it is no count."""
    if quantity is None:
        return absent
    number = _parse_decimal(str(quantity).strip())
    return absent if number is None else min(int(number), UNLIMITED)


def _parse_decimal(text: str) -> Decimal | None:
    """Return the value of a quantity, `MOST` for a larger one; None if the text is no quantity."""
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
