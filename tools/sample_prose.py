"""Print docstrings and names of the code, drawn at random, for a reader who has not seen it.

    python tools/sample_prose.py --seed 1 --count 30

A text that has to be read twice, or a name that does not say what it is, is worth mending.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("operator", "predictor")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def definitions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """Yield every function and class with its place, FILE:LINE."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, DEFINITIONS):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def main() -> None:
    """Print the sample."""
    parser = argparse.ArgumentParser(description="Print docstrings and names of the code, drawn at random.")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--count", type=int, default=30, help="of docstrings, and of names")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)  # noqa: S311 (no secret)
    every = list(definitions())
    described = [(place, node, text) for place, node in every if (text := ast.get_docstring(node))]
    for place, node, text in draw.sample(described, arguments.count):
        print(f"{place} {node.name}\n    {text.replace(chr(10), chr(10) + '    ')}\n")
    for place, node in draw.sample(every, arguments.count):
        kind = "class" if isinstance(node, ast.ClassDef) else "def"
        of = "" if kind == "class" else f"({', '.join(item.arg for item in node.args.args)})"  # type: ignore[union-attr]
        print(f"{place} {kind} {node.name}{of}")


if __name__ == "__main__":
    main()
