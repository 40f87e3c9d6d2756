"""Resource quantities as Kubernetes writes them (k8s.io/apimachinery, api/resource), as whole numbers."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

UNLIMITED = 2**31
"""What a larger quantity counts as."""


def count(value: object) -> int | None:
    """A whole number from a label or a resource quantity; None where it is none."""
    text = str(value).strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else None


def whole(quantity: object, absent: int = 0) -> int:
    """A count of GPUs from a quantity, which may be written 16, "16" or "1k"."""
    if quantity is None:
        return absent
    text = str(quantity).strip()
    scale = _SUFFIXES.get(text[-2:], _SUFFIXES.get(text[-1:]))
    digits = text if scale is None else text.rstrip("kMGTPEim")
    try:
        return min(int(Decimal(digits) * (scale or 1)), UNLIMITED)
    except (InvalidOperation, ValueError, OverflowError):
        return absent


_SUFFIXES = {"m": Decimal("0.001"), "k": Decimal(1000), "M": Decimal(10**6), "Ki": Decimal(1024), "Mi": Decimal(2**20)}
