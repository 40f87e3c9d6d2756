"""`tilecast completion`: print a script that completes verbs, options, presets and files in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilecast import cli, zoo
from tilecast.hardware import instances, list_gpus, list_links
from tilecast.plan_columns import BY_FLAG
from tilecast.spec import SpecError
from tilecast.sweeps import FIELDS

SHELLS = ("bash", "zsh", "fish")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        'bash: eval "$(tilecast completion bash)" in ~/.bashrc; zsh: tilecast completion zsh > _tilecast, in a '
        "folder of $fpath; fish: tilecast completion fish > ~/.config/fish/completions/tilecast.fish"
    )
    parser.add_argument("shell", choices=SHELLS)


def run(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise SpecError("completion", "needs shtab, which is not installed", "pip install shtab") from None
    whole = cli.build_parser()
    presets = sorted({model.name for model in zoo.presets().values()})
    gpus, links = list(list_gpus()), list(list_links())
    words = {
        "gpus": ("pools", [*gpus, *instances.list_node_types()]),
        "baseline": ("gpus", gpus),
        "measured": ("gpus", gpus),
        "link": ("links", links),
        "name": ("names", [*gpus, *presets, *links]),
        "plan": ("plans", [f"{key}=" for key in BY_FLAG]),
        "over": ("fields", [f"{field}=" for field in FIELDS]),
    }
    for action in _iterate_actions(whole):
        if options.shell == "zsh" and isinstance(action.metavar, str):
            # A colon ends the message of zsh's _arguments, and what follows would run as a command.
            action.metavar = action.metavar.replace(":", "\\:")
        if action.dest == "job":
            action.complete = _build_job_completion(" ".join(presets))  # type: ignore[attr-defined]
        elif action.dest in words and action.metavar != "FILE.toml":
            action.complete = _build_word_completion(*words[action.dest])  # type: ignore[attr-defined]
        elif action.type is Path or action.dest in ("files", "nodes", "target"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(whole, options.shell))
    return cli.EXIT_OK


def _iterate_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions (arguments) of a parser and of all its subparsers."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _iterate_actions(below)
        else:
            yield action


def _build_word_completion(name: str, words: list[str]) -> dict[str, Any]:
    """Return completion code by shell for an argument that is one word, or several separated by commas.

    Args:
        name: name of its function in the script, which must differ between arguments with different words.
        words: the words.
    """
    function, listed = f"_tilecast_{name}", " ".join(words)
    # bash completes what follows the last comma, and repeats what precedes it.
    bash = f'''{function}() {{
  local before=""
  case "$1" in *,*) before="${{1%,*}},";; esac
  compgen -P "$before" -W "{listed}" -- "${{1##*,}}"
}}'''
    zsh = f"{function}() {{ local -a words; words=({listed}); compset -P '*,'; compadd -a words; }}"
    fish = f"function {function}; printf '%s\\n' {listed}; end"
    preamble = {"bash": bash, "zsh": zsh, "fish": fish}
    return {"bash": function, "zsh": function, "fish": f"({function})", "preamble": preamble}


def _build_job_completion(presets: str) -> dict[str, Any]:
    """Return completion code by shell, for an argument that is a preset or a file."""
    return {
        "bash": "_tilecast_job",
        "zsh": "_tilecast_job",
        "fish": "(_tilecast_job)",
        "preamble": {
            "bash": f'_tilecast_job() {{ compgen -W "{presets}" -- "$1"; compgen -f -- "$1"; }}',
            "zsh": f"_tilecast_job() {{ _alternative 'presets:model preset:({presets})' 'files:file:_files' }}",
            "fish": f"function _tilecast_job; printf '%s\\n' {presets}; __fish_complete_path (commandline -ct); end",
        },
    }
