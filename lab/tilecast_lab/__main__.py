"""Command line of the laboratory: `python -m tilecast_lab fit`, `… card`, `… links`, `… reprice` and others."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import tilecast.kernels
from tilecast import environment
from tilecast.spec import SpecError
from tilecast_lab import collect
from tilecast_lab.fit import graphs

CARD = Path(tilecast.kernels.__file__).parent / "weights" / "CARD.md"
DATA_HELP = "folder with kernels/ and neusight/ (default: TILECAST_DATA)"


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tilecast_lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fit = commands.add_parser("fit", help="train the utilization model and write it as ONNX")
    fit.add_argument("--data", type=Path, default=os.environ.get("TILECAST_DATA"), help=DATA_HELP)
    fit.add_argument("--protocol", choices=("neusight",), help="train on NeuSight's kernels_train alone")
    fit.add_argument("--leave-out", nargs="+", default=[], metavar="GPU", help="GPUs whose rows are not trained on")
    fit.add_argument("--hold-out", type=int, choices=range(5), metavar="FOLD", help="a fifth of the shapes, left out")
    only_help = "families and cases of ceilings to fit; the rest is kept as shipped"
    fit.add_argument("--only", nargs="+", default=[], metavar="NAME", help=only_help)
    fit.add_argument("--effort", type=float, default=1.0, help="factor on the number of training steps")
    fit.add_argument("--seed", type=int, default=0)
    fit.add_argument("-o", "--output", type=Path, required=True)
    card = commands.add_parser("card", help="measure the shipped model and write its card")
    card.add_argument("--data", type=Path, default=os.environ.get("TILECAST_DATA"), help=DATA_HELP)
    card.add_argument("--work", type=Path, required=True, help="folder for the models of the trials; reused")
    card.add_argument("--effort", type=float, default=0.4, help="factor on the training steps of those models")
    card.add_argument("--seed", type=int, default=0)
    card.add_argument("-o", "--output", type=Path, default=CARD)
    links = commands.add_parser("links", help="fit the constants of NVLink and print its errors")
    links.add_argument("--data", type=Path, default=os.environ.get("TILECAST_DATA"), help="folder with collectives/")
    links.add_argument("--leave-out", type=int, default=0, metavar="GPUS", help="judge by rows of so many, not fitted")
    networks = commands.add_parser("networks", help="fit the constants of networks between nodes and print its errors")
    networks.add_argument("--data", type=Path, default=os.environ.get("TILECAST_DATA"), help="folder of the tables")
    moved = commands.add_parser("reprice", help="compare today's forecasts of measured steps with the committed ones")
    moved.add_argument("--data", type=Path, default=os.environ.get("TILECAST_DATA"), help="folder of the tables")
    moved.add_argument("--graphs", type=Path, help="folder of traced graphs, for the rows that name one")
    moved.add_argument("--write", action="store_true", help="accept today's forecasts")
    support = commands.add_parser("support", help="write docs/support.md: plots of errors and the support matrix")
    support.add_argument("--data", type=Path, default=os.environ.get("TILECAST_DATA"), help="folder of the tables")
    graphs.arguments(commands.add_parser("graphs", help="trace the models of a runs table by their names in timm"))
    commands.add_parser("collect", parents=[collect.arguments()], add_help=False, help="measure kernels on one GPU")
    return parser


def main() -> int:
    """Run the command and return the exit status."""
    given = _arguments().parse_args()
    environment.apply_environment(os.environ)
    if given.command == "collect":
        return collect.run(given)
    if given.command != "graphs" and given.data is None:
        print("data: no folder is given; pass --data DIR or set TILECAST_DATA", file=sys.stderr)
        return 2
    try:
        if given.command == "graphs":
            return graphs.run(given)
        if given.command == "card":
            from tilecast_lab.fit import card

            card.write(Path(given.data), given.output, given.work, given.effort, given.seed)
        elif given.command == "networks":
            from tilecast_lab.fit.networks import report_networks

            report_networks(Path(given.data))
        elif given.command == "support":
            from tilecast_lab import reprice, support

            support.write_page(reprice.read_rows(Path(given.data)))
        elif given.command == "reprice":
            from tilecast_lab import reprice
            from tilecast_lab.validate.graphs import Graphs

            text, is_moved = reprice.run(
                Path(given.data), write=given.write, graphs=Graphs(given.graphs) if given.graphs else None
            )
            print(text)
            return int(is_moved and not given.write)
        elif given.command == "links":
            from tilecast_lab.fit import links

            links.report_fit(Path(given.data), given.leave_out)
        else:
            from tilecast_lab.fit.training import fit

            fit(
                Path(given.data), given.output, protocol=given.protocol, leave_out=given.leave_out,
                hold_out=given.hold_out, effort=given.effort, seed=given.seed, only=given.only,
            )  # fmt: skip
    except SpecError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
