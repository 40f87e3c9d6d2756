"""`python -m tilecast_fit fit` and `python -m tilecast_fit card`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tilecast.spec import SpecError


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tilecast_fit", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fit = commands.add_parser("fit", help="train the utilization model and write it as ONNX")
    fit.add_argument(
        "--data", type=Path, default=os.environ.get("TILECAST_DATA"), help="folder with kernels/ and neusight/"
    )
    fit.add_argument("--protocol", choices=("neusight",), help="train on NeuSight's kernels_train alone")
    fit.add_argument("--leave-out", nargs="+", default=[], metavar="GPU", help="GPUs whose rows are not trained on")
    fit.add_argument(
        "--hold-out", type=int, choices=range(5), metavar="FOLD", help="leave out one fold of five of the shapes"
    )
    fit.add_argument("--effort", type=float, default=1.0, help="factor on the number of training steps")
    fit.add_argument("--seed", type=int, default=0)
    fit.add_argument("-o", "--output", type=Path, required=True)
    return parser


def main() -> int:
    """Run the command; returns the exit status."""
    given = _arguments().parse_args()
    if given.data is None:
        print("data: no folder is given; pass --data DIR or set TILECAST_DATA", file=sys.stderr)  # noqa: T201
        return 2
    from tilecast_fit.training import fit

    try:
        fit(
            Path(given.data), given.output, protocol=given.protocol, leave_out=given.leave_out,
            hold_out=given.hold_out, effort=given.effort, seed=given.seed,
        )  # fmt: skip
    except SpecError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
