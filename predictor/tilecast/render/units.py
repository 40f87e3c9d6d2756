"""Format quantities for people, with at most three significant figures and one unit."""

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
"""Units of time, each with the seconds from which a larger unit is used, its length in seconds, and its name."""


def format_duration(seconds: float | None) -> str:
    """Format seconds, such as `85ms`, `8.2s`, `42min` or `31d`. Return an empty string for None."""
    if seconds is None:
        return ""
    _, unit, name = _choose_time_unit(seconds)
    return f"{_format_three_digits(seconds / unit)}{name}" if seconds else "0s"


def format_interval(lower: float, upper: float) -> str:
    """Format a range of seconds, such as `7.62-9.03s`, in the unit that suits its lower end."""
    _, unit, name = _choose_time_unit(lower)
    return f"{_format_three_digits(lower / unit)}-{_format_three_digits(upper / unit)}{name}"


def _format_three_digits(value: float) -> str:
    """Format a number with three significant figures. Large numbers have no exponent."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def _choose_time_unit(seconds: float) -> tuple[float, float, str]:
    return next(scale for scale in _SCALES if seconds < scale[0])


def format_money(value: float | None, currency: str) -> str:
    """Format an amount of money, such as `$2,507` or `251 CHF`. Return an empty string for None."""
    if value is None:
        return ""
    text = f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
    return f"{_SYMBOL[currency]}{text}" if currency in _SYMBOL else f"{text} {currency}"


def format_count(value: float) -> str:
    """Format a count with an SI prefix, such as `1.05M` or `512`."""
    for limit, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.0f}"


def format_rate(per_s: float) -> str:
    """Format an amount per second with at most three significant figures and no prefix, such as `11,800` or `0.43`."""
    return f"{float(f'{per_s:.3g}'):,g}"


def format_step_count(steps: int) -> str:
    """Format a number of steps with its noun, such as `2,000 steps` or `1 step`."""
    return f"{steps:,} step{'s' * (steps != 1)}"


def shorten_text(text: str, most: int) -> str:
    """Return a text of at most `most` characters. A longer text is cut, and ends with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def format_memory(lower_bytes: float, upper_bytes: float, available_bytes: float) -> str:
    """Format the memory that a plan takes on a GPU, and the available memory, such as `46-63 of 78 GiB a GPU`."""
    return f"{format_gibibyte_range(lower_bytes, upper_bytes)} of {format_gibibytes(available_bytes)} GiB a GPU"


def format_parameters(value: float) -> str:
    """Format a number of parameters, such as `124M`, `8.03B` or `1.03T`."""
    return format_count(value).replace("G", "B")


def format_gibibytes(value: float) -> str:
    """Format bytes as a whole number of GiB without the unit, such as `61`."""
    return f"{value / GIB:.0f}"


def format_gibibyte_range(lower: float, upper: float) -> str:
    """Format a range of bytes in whole GiB, such as `51-58`. If both ends round to one number, return it alone."""
    ends = dict.fromkeys((format_gibibytes(lower), format_gibibytes(upper)))
    return "-".join(ends)


def format_bytes(value: float) -> str:
    """Format bytes with a binary unit, such as `61.2 GiB`, `4 MiB` or `512 B`."""
    for limit, unit in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= limit:
            return f"{_format_three_digits(value / limit)} {unit}"
    return f"{value:.0f} B"
