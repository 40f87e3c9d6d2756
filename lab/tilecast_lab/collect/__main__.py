"""Entry of `python -m collect`, run from the folder above this one."""

import sys

from . import main

sys.exit(main())
