"""Read the step of a training run from what the run has logged.

`formats/` has a module for each format. A format of lines is a row of patterns; a format of experiment trackers gives
rows of metrics (`metrics`). Both end in a `StepSeries`, whose steady steps are measured (`steps`).
"""

from tilecast.logs.formats import NAMES, TEXT_FORMATS
from tilecast.logs.reading import MAX_BYTES, read_log
from tilecast.logs.steps import LoggedRun
from tilecast.logs.text import find_logged_run, split_lines

__all__ = ["MAX_BYTES", "NAMES", "TEXT_FORMATS", "LoggedRun", "find_logged_run", "read_log", "split_lines"]
