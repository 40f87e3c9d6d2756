"""Forecast training steps before anything runs: which GPU pool, how many GPUs, split how, and how sure.

`tilecast.advise(...)` answers for a job; docs/python.md shows the rest. The functions need numpy and ONNX Runtime, and
are imported when the first of them is used; `__init__.pyi` has their types.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.3.0"

__all__ = [
    "Advice",
    "Fits",
    "Forecast",
    "InputWarning",
    "PoolFit",
    "Queue",
    "SpecError",
    "Sweep",
    "Table",
    "__version__",
    "advise",
    "fits",
    "forecast",
    "gpus",
    "launchers",
    "links",
    "models",
    "queue",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tilecast' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module("tilecast.public.api"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
