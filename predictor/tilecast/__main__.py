"""Run the command `tilecast` in a process of its own: as `python -m tilecast`, or by the installed scripts."""

import gc
import sys

_ALLOCATIONS = 200_000
"""Number of new objects after which the garbage collector runs.

Imports make many objects and little garbage. With the usual number, the collector takes 6 % of a short command.
"""


def run() -> int:
    """Run the command line and return the exit status."""
    gc.set_threshold(_ALLOCATIONS)
    from tilecast.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
