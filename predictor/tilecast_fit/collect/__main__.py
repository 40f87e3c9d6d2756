"""`python -m collect`, beside this folder."""

import sys

from . import main

sys.exit(main())
