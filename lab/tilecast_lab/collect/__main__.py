"""Entry of `python -m collect` and `python -m collect steps`, run from the folder above this one."""

import sys

from . import main, steps

if __name__ == "__main__":
    sys.exit(steps.main(sys.argv[2:]) if sys.argv[1:2] == ["steps"] else main())
