"""Read a launch command, a shell script, or the configuration of a training framework.

Nothing is executed. Only files within the folder of the named file are opened, and their size and depth are bounded.
Each launcher has a table of options, and a function that turns their values into a job and a plan.
"""

from __future__ import annotations

from tilecast.launch_options.options_table import UNKNOWN
from tilecast.readers.changes import list_changes
from tilecast.readers.command import LaunchLine, find_last_value, find_launch
from tilecast.readers.documents import load_mapping
from tilecast.readers.models import find_preset_in_name
from tilecast.readers.reading import LaunchReading, require_priced
from tilecast.readers.shell import REST, SHELLS, Script, read_script, split_shell_call, unknown
from tilecast.readers.sources import is_launch_file, name_configuration, read_bounded, read_file, read_line, read_words

__all__ = [
    "REST",
    "SHELLS",
    "UNKNOWN",
    "LaunchLine",
    "LaunchReading",
    "Script",
    "find_last_value",
    "find_launch",
    "find_preset_in_name",
    "is_launch_file",
    "list_changes",
    "load_mapping",
    "name_configuration",
    "read_bounded",
    "read_file",
    "read_line",
    "read_script",
    "read_words",
    "require_priced",
    "split_shell_call",
    "unknown",
]
