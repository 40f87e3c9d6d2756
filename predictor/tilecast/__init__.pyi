# Types of what `__init__` imports when it is first used.

from tilecast.public.api import (
    Advice,
    Fits,
    Forecast,
    InputWarning,
    PoolFit,
    Queue,
    SpecError,
    Sweep,
    Table,
    advise,
    fits,
    forecast,
    gpus,
    launchers,
    links,
    models,
    queue,
    sweep,
)

__version__: str

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
