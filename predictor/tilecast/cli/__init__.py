"""Command line: read manifests and print advice, without a cluster.

Each verb is a module of this package. Its function `arguments(parser)` declares arguments, and `run(options)` returns
the exit status. Only the module of the verb in use is imported.

Exit status: 0 success (of `advise`: with a recommendation), 2 invalid input, 3 advice without a recommendation, or jobs
that `scan` would change.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from tilecast import __version__, environment
from tilecast.cli import progress
from tilecast.cli.parser import BAD_INPUT, OneLineErrorParser, add_quiet_flag, write_example
from tilecast.cli.screen import color_word
from tilecast.inputs.reading import InputWarning
from tilecast.spec import SpecError

EXIT_OK, EXIT_BAD_INPUT, EXIT_NO_RECOMMENDATION = 0, BAD_INPUT, 3

VERBS: Mapping[str, str] = {
    "advise": "the best pool and plan for a job",
    "fits": "whether a job fits into memory, on how few GPUs of each pool, and else what would help",
    "scan": "every GPU job of a cluster or a folder: its forecast as it is, and what would be cheaper",
    "queue": "which job of a queue on which pool, and when each starts and ends",
    "sweep": "the advice for one value of a number after another: GPUs, batch, bandwidth, price …",
    "show": "what Tilecast knows, and what it sees in a cluster",
    "trace": "a PyTorch module or an ONNX file as a graph that `advise` and jobs read without torch and onnx",
    "validate": "forecasts against measurements",
    "calibrate": "corrections from measured runs of yours, or a link from nccl-tests' logs",
    "learning": "what a cluster learnt from measured steps, from whom, and how it forgets",
    "web": "a page to try jobs and pools on, for the local machine",
    "mcp": "forecasts for agents, by the Model Context Protocol on standard input and output",
    "completion": "what bash, zsh or fish need to complete the command line",
}
"""Verbs and their purposes. Each verb is a module of this package."""

_JOB_VERBS = ("advise", "fits", "sweep")
"""Verbs that read a job, which may be a launch command after `--`."""
_PURPOSE = "Which GPU pool, how many GPUs, split how: forecast before anything runs."
_FIRST_STEPS = f"""\
{_PURPOSE}

  tilecast advise llama-3.1-8b --seq 8192 --batch 128 --gpus h100-sxm:16,a100-80:16   the best pool and plan
  tilecast fits llama-3.1-70b --seq 8192 --batch 64 --gpus h100-sxm:64                whether it fits, on how few GPUs
  tilecast show models                                                                what can be named

`tilecast --help` lists all verbs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run its verb and return the exit status."""
    _configure_streams()
    given = _move_quiet_behind_verb(list(sys.argv[1:] if arguments is None else arguments))
    if not given:
        print(_FIRST_STEPS)
        return EXIT_BAD_INPUT
    parser = build_parser(given[:1])
    words = given
    given, command = _split_command(given)
    options = parser.parse_args(given)
    options.words = words
    if given[0] in _JOB_VERBS:
        options.command = command
        if options.job is None and not command:
            parser.exit(EXIT_BAD_INPUT, f"tilecast: job: is missing; for instance `{write_example(given[0])}`\n")
    run: Callable[[argparse.Namespace], int] = options.run
    environment.apply_environment(os.environ)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if options.quiet else "always", InputWarning)
            warnings.showwarning = _print_warning
            progress.set_quiet(options.quiet)
            try:
                status = run(options)
            finally:
                progress.end_progress()
        sys.stdout.flush()
    except SpecError as error:
        print(f"{color_word('tilecast:', 'error', sys.stderr)} {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except BrokenPipeError:
        sys.stderr.close()
        return EXIT_OK
    except OSError as error:
        print(f"tilecast: standard output: cannot be written: {error.strerror or error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return status


def _move_quiet_behind_verb(given: Sequence[str]) -> list[str]:
    """Return the arguments with every `--quiet` in front of the verb moved behind it."""
    verb = next((place for place, word in enumerate(given) if word != "--quiet"), len(given))
    return [*given[verb : verb + 1], *given[:verb], *given[verb + 1 :]]


def _split_command(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of a verb at `--` into its own and the words of a launch command.

    Only verbs that read a job accept a launch command. Other verbs keep all arguments.
    """
    place = given.index("--") if given[0] in _JOB_VERBS and "--" in given else len(given)
    return list(given[:place]), list(given[place + 1 :])


def _print_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """Print a warning as one line on standard error. It replaces `warnings.showwarning`."""
    text = str(message) if issubclass(category, InputWarning) else f"{category.__name__}: {message}"
    print(f"{color_word('tilecast:', 'warning', sys.stderr)} {text}", file=sys.stderr)


def _configure_streams() -> None:
    """Make the standard streams accept all characters in any locale. Replace a closed output by the null device."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 (open to the end)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def build_parser(names: Sequence[str] = tuple(VERBS)) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Arguments are added only for the verbs in `names`, because that imports modules.
    """
    whole = OneLineErrorParser(prog="tilecast", description=_PURPOSE)
    whole.add_argument("--version", action="version", version=__version__)
    whole.add_argument("--quiet", action="store_true", help="no progress and no warnings, before or behind the verb")
    verbs = whole.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, purpose in VERBS.items():
        one = verbs.add_parser(verb, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        if verb in names:
            module = import_module(f"tilecast.cli.{verb}")
            module.arguments(one)
            add_quiet_flag(one)
            one.set_defaults(run=module.run)
    return whole
