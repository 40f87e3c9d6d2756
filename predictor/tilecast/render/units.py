"""Quantities as people read them: three significant figures at most, one unit."""

from __future__ import annotations

GIB = 2**30

_SYMBOL = {"USD": "$", "EUR": "€", "GBP": "£"}


def seconds(value: float) -> str:
    """A duration of a step: `85ms`, `8.2s`, `4.1min`."""
    if value < 0.9995:
        return f"{value * 1e3:.3g}ms"
    if value < 600:
        return f"{value:.1f}s" if value < 100 else f"{value:.0f}s"
    return f"{value / 60:.1f}min"


def interval(lower: float, upper: float) -> str:
    """A range of step times in the unit of its upper end: `7.6-9.0s`."""
    if upper < 0.9995:
        return f"{lower * 1e3:.3g}-{upper * 1e3:.3g}ms"
    if upper < 600:
        places = 1 if upper < 100 else 0
        return f"{lower:.{places}f}-{upper:.{places}f}s"
    return f"{lower / 60:.1f}-{upper / 60:.1f}min"


def duration(value: float) -> str:
    """A duration of a run: `42min`, `22.8h`, `125h`, `31d`."""
    hours = value / 3600
    if hours < 1:
        return f"{value / 60:.0f}min"
    if hours < 100:
        return f"{hours:.1f}h"
    return f"{hours:.0f}h" if hours < 500 else f"{hours / 24:.0f}d"


def money(value: float, currency: str) -> str:
    """An amount: `$2,507`, `251 CHF`."""
    text = f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
    return f"{_SYMBOL[currency]}{text}" if currency in _SYMBOL else f"{text} {currency}"


def count(value: float) -> str:
    """A large count: `1.05M`, `4.19M`, `512`."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.0f}"


def gibibytes(value: float) -> str:
    """Bytes in whole GiB: `61`."""
    return f"{value / GIB:.0f}"
