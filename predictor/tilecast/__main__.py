"""Run the command `tilecast` with `python -m tilecast`."""

import sys

from tilecast.cli import main

sys.exit(main())
