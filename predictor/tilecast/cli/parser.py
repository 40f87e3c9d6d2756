"""Argument parser whose errors are one line each: the argument, the problem and a remedy."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import NoReturn

from tilecast.cli.screen import color_word

BAD_INPUT = 2
"""Exit status of a command line that cannot be parsed."""

_EXAMPLES: Mapping[str, str] = {
    "advise": "llama-3.1-8b --seq 8192 --batch 128 --gpus h100-sxm:16",
    "fits": "llama-3.1-70b --seq 8192 --batch 64 --gpus h100-sxm:64",
    "sweep": "llama-3.1-8b --seq 8192 --batch 128 --gpus h100-sxm:64 --over pool.gpus=8..64",
    "scan": "jobs/ --gpus h100-sxm:64",
    "queue": "jobs/ --gpus h100-sxm:64",
    "trace": "model.onnx -o graph.json",
    "validate": "runs RUNS.csv",
    "calibrate": "RUNS.csv -o corrections.json",
    "learning": "list",
    "completion": "bash",
}
"""Example arguments of each verb that needs arguments."""


def add_quiet_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--quiet` to the parser of a verb and to its subparsers."""
    kinds = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    below = [one for kind in kinds for one in kind.choices.values()]
    # A subparser's default would overwrite what stands before its name.
    parser.set_defaults(quiet=False)
    for one in (parser, *below):
        one.add_argument(
            "--quiet", action="store_true", default=argparse.SUPPRESS, help="no progress and no warnings, errors alone"
        )


_SYNONYMS = {
    "--batch-size": "--batch",
    "--global-batch-size": "--batch",
    "--seq-len": "--seq",
    "--seq-length": "--seq",
    "--sequence-length": "--seq",
    "--max-length": "--seq",
    "--dtype": "--precision",
}
"""Names under which launchers know flags of ours whose names are not similar."""


def write_example(verb: str) -> str:
    """Return an example of a verb's command line."""
    return f"tilecast {verb} {_EXAMPLES[verb]}"


class OneLineErrorParser(argparse.ArgumentParser):
    """Argument parser that reports an error on one line, with a remedy."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{color_word('tilecast:', 'error', sys.stderr)} {self._reword_message(message)}\n")

    def _reword_message(self, message: str) -> str:
        """Return argparse's message as `argument: problem; remedy`."""
        if found := re.fullmatch(
            r"(?:the following|one of the) arguments (.*?)(?: is|are)? ?required(?:: (.*))?", message
        ):
            verb = self.prog.split(" ")[-1]
            remedy = f"for instance `{write_example(verb)}`" if verb in _EXAMPLES else f"see `{self.prog} --help`"
            names = found[2] or found[1].replace(" ", " or ")
            return f"{names}: {'are' if ', ' in names else 'is'} missing; {remedy}"
        if found := re.fullmatch(r"argument (.+?): invalid choice: (.+?) \(choose from (.+)\)", message):
            given, choices = found[2].strip("'"), [choice.strip("'") for choice in found[3].split(", ")]
            return f"{found[1]}: {given!r} is not allowed; {suggest_name(given, choices, 'use one of')}"
        if found := re.fullmatch(r"unrecognized arguments: (.*)", message):
            word = found[1].split(" ")[0].split("=")[0]
            flags = sorted(set(self._list_flags()))
            near = [flag for flag in (_SYNONYMS.get(word),) if flag in flags]
            if not near and word[:1] == "-":
                near = get_close_matches(word, flags, n=1, cutoff=0.7)
            remedy = f"did you mean {near[0]}?" if near else f"leave it out, or see `{self.prog} --help`"
            return f"{found[1][:60]}: is no argument; {remedy}"
        if found := re.fullmatch(r"argument (\S+?)(?:/\S+)?: expected (?:one|at least one) argument", message):
            return f"{found[1]}: has no value; write {found[1]} {self._find_placeholder(found[1])}"
        if found := re.fullmatch(r"argument (\S+): not allowed with argument (\S+)", message):
            return f"{found[1]}: is given beside {found[2]}; give one of them"
        return f"{message.removeprefix('argument ')}; see `{self.prog} --help`"

    def _list_flags(self) -> Iterator[str]:
        """Yield the flags of this parser and of its subparsers."""
        for action in self._actions:
            yield from (flag for flag in action.option_strings if flag.startswith("--"))
            if isinstance(action, argparse._SubParsersAction):
                for below in action.choices.values():
                    yield from below._list_flags()

    def _find_placeholder(self, flag: str) -> str:
        """Return the placeholder for a flag's value in the help text."""
        action = self._option_string_actions[flag]
        if action.choices is not None:
            return "|".join(map(str, action.choices))
        return str(action.metavar or action.dest.upper())


def suggest_name(word: str, names: list[str], otherwise: str) -> str:
    """Return a remedy for an unknown word: the most similar name, or else `otherwise` followed by all names."""
    near = get_close_matches(word.lower(), names, n=1, cutoff=0.75)
    return f"did you mean {near[0]}?" if near else f"{otherwise} {', '.join(names)}"
