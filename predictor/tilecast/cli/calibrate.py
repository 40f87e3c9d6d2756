"""`tilecast calibrate`: fit corrections to measured runs, or a link to logs of nccl-tests."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from tilecast.api import calibration as calibration_file
from tilecast.cli import EXIT_OK
from tilecast.cli.validate import load_lab_function
from tilecast.collectives import link_calibration
from tilecast.hardware import NAME, find_gpu, find_link
from tilecast.learning import calibration
from tilecast.spec import SpecError
from tilecast.validate import calibration as curves
from tilecast.validate.runs import read_table


def arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("runs", nargs="*", default=[], type=Path, metavar="RUNS.csv", help="tables of measured runs")
    what.add_argument("--nccl-tests", nargs="+", type=Path, metavar="LOG")
    parser.add_argument("--link", metavar="NAME", help="the link to start from; that of the log's GPU if absent")
    parser.add_argument("--name", metavar="NAME", help="what to call it; the link's name with -measured if absent")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE.toml", help="standard output if absent; of runs JSON"
    )


def run(options: argparse.Namespace) -> int:
    return _calibrate_runs(options) if options.runs else _calibrate_link(options)


def _calibrate_runs(options: argparse.Namespace) -> int:
    for flag in ("link", "name"):
        if getattr(options, flag) is not None:
            raise SpecError(f"--{flag}", "is for nccl-tests' logs", "leave it out")
    measured = load_lab_function("measured") or curves.forecast_runs
    sample = measured([row for path in options.runs for row in read_table(path)])
    print(curves.calibration_report(sample))
    if options.output is not None:
        _write_file(options.output, calibration_file.format_calibration(calibration.fit_calibration(sample.runs)))
        print(f"wrote {options.output}: give it to `tilecast advise --calibration {options.output}`")
    return EXIT_OK


def _calibrate_link(options: argparse.Namespace) -> int:
    logs = [link_calibration.read_log(path) for path in options.nccl_tests]
    measured = link_calibration.Measurements.concatenate([log.measured for log in logs])
    spans = max(log.nodes for log in logs) > 1
    if options.link is None and spans:
        raise SpecError("--link", "the log spans nodes", "name the network to start from, see `tilecast show links`")
    link = find_link(options.link or find_gpu(logs[0].gpu).intra_link)
    if link.per_node != spans:
        joins = "nodes" if link.per_node else "GPUs of a node"
        raise SpecError("--link", f"{link.name} joins {joins}, the log another", "name a link that the log measured")
    name = options.name or f"{link.name}-measured"
    if re.fullmatch(NAME, name) is None:
        raise SpecError("--name", f"{name!r} is no name for a link", "use small letters, digits, dots and dashes")
    other = find_link(find_gpu(logs[0].gpu).intra_link if spans else "ethernet-100")
    done = link_calibration.calibrate_link(link, measured, other, name)
    source = f"tilecast calibrate, from {link.name}: {len(measured)} rows of nccl-tests on {logs[0].gpu}"
    text = link_calibration.format_toml(done.link, source)
    table = [f"{'collective':<28}{'rows':>6}{'before':>9}{'after':>9}{'unseen':>9}"]
    table += [f"{what:<28}{rows:>6}{was:>9.1%}{now:>9.1%}{out:>9.1%}" for what, rows, was, now, out in done.errors]
    if options.output is None:
        print("\n".join(f"# {line}" for line in table), text, sep="\n", end="")
        return EXIT_OK
    _write_file(options.output, text)
    print("\n".join(table))
    print(f"wrote {options.output}: put it into the folder that TILECAST_LINKS names, and name the link {name}")
    return EXIT_OK


def _write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(str(path), "cannot be written", str(error.strerror or error)) from None
