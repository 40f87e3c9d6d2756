# Types of what `__init__` imports when it is first used.

from tilecast.inputs.reading import InputWarning
from tilecast.public.api import advise, fits, forecast, gpus, launchers, links, models, queue, sweep
from tilecast.public.results import Advice, Fits, Forecast, PoolFit, Queue, Sweep, Table
from tilecast.spec import SpecError

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
