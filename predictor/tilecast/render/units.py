"""Format quantities for people: three significant figures at most, one unit."""

from __future__ import annotations

GIB = 2**30

_SYMBOL = {"USD": "$", "EUR": "€", "GBP": "£"}


_SCALES = (
    (1e-3, 1e-6, "us"),
    (1.0, 1e-3, "ms"),
    (600.0, 1.0, "s"),
    (7200.0, 60.0, "min"),
    (345600.0, 3600.0, "h"),
    (float("inf"), 86400.0, "d"),
)
"""Upper limit in seconds, unit in seconds, and name of each unit."""


def format_duration(seconds: float | None) -> str:
    """Format seconds: `85ms`, `8.2s`, `42min`, `22.8h`, `31d`, empty if they are not known."""
    if seconds is None:
        return ""
    _, unit, name = _time_unit(seconds)
    return f"{_three_digits(seconds / unit)}{name}" if seconds else "0s"


def format_interval(lower: float, upper: float) -> str:
    """Format a range of seconds in the unit of its lower end: `7.62-9.03s`."""
    _, unit, name = _time_unit(lower)
    return f"{_three_digits(lower / unit)}-{_three_digits(upper / unit)}{name}"


def _three_digits(value: float) -> str:
    """Format three significant figures, never with an exponent for a large number."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def _time_unit(seconds: float) -> tuple[float, float, str]:
    return next(scale for scale in _SCALES if seconds < scale[0])


def format_money(value: float | None, currency: str) -> str:
    """Format an amount: `$2,507`, `251 CHF`, empty for None."""
    if value is None:
        return ""
    text = f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
    return f"{_SYMBOL[currency]}{text}" if currency in _SYMBOL else f"{text} {currency}"


def format_count(value: float) -> str:
    """Format a large count: `1.05M`, `4.19M`, `512`."""
    for limit, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.0f}"


def format_parameters(value: float) -> str:
    """Format a number of parameters as models are named: `124M`, `8.03B`, `1.03T`."""
    return format_count(value).replace("G", "B")


def format_gibibytes(value: float) -> str:
    """Format bytes in whole GiB: `61`."""
    return f"{value / GIB:.0f}"


def format_gibibyte_range(lower: float, upper: float) -> str:
    """Format a range of bytes in whole GiB: `51-58`, or one number where the ends are equal."""
    ends = dict.fromkeys((format_gibibytes(lower), format_gibibytes(upper)))
    return "-".join(ends)


def format_bytes(value: float) -> str:
    """Format bytes in the binary unit that suits: `61.2 GiB`, `4 MiB`, `512 B`."""
    for limit, unit in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= limit:
            return f"{_three_digits(value / limit)} {unit}"
    return f"{value:.0f} B"
