"""Read the step time of a training run from its log.

`formats/` has a module for each format. A format of text lines is a set of patterns. A format of an experiment tracker
gives rows of metrics (`metrics`). Both give a `StepSeries`, from which the steady step is measured (`steps`).
"""

from tilecast.logs.formats import NAMES, TEXT_FORMATS
from tilecast.logs.reading import MAX_BYTES, read_log
from tilecast.logs.steps import LoggedRun
from tilecast.logs.text import find_logged_run, split_lines

__all__ = ["MAX_BYTES", "NAMES", "TEXT_FORMATS", "LoggedRun", "find_logged_run", "read_log", "split_lines"]
