"""Make the pictures of a release: `python tools/pictures.py`, or `make pictures`.

The first screen is drawn as a terminal shows it, in colours, and is part of the documentation (`docs/first-screen.svg`;
a test holds that it shows today's output). The report of an example job and the page of an example queue are
photographed by a headless Chromium, in the light and the dark, on a desk and on a phone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

from rich.console import Console
from rich.text import Text

from tilecast.cli import main as tilecast

ROOT = Path(__file__).resolve().parent.parent
FIRST_SCREEN = ROOT / "docs" / "first-screen.svg"
ADVISE = ("advise", "examples/jobs/llama-7b-pretrain.yaml", "--nodes", "examples/clusters/mixed.yaml")
QUEUE = ("queue", "examples/queue", "--nodes", "examples/clusters/mixed.yaml")
WINDOWS = {"light": ("1200,1600", 1), "dark": ("1200,1600", 0), "phone": ("390,1600", 1)}
"""Size of the window in pixels, and Chromium's number of the preferred colours, by name of the picture."""


def find_chromium() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class _Terminal(io.StringIO):
    """A stream that takes colours."""

    def isatty(self) -> bool:
        return True


def draw_first_screen() -> str:
    """Return the example's first screen as SVG. It fetches no font: the reader's own is shown."""
    stream = _Terminal()
    with patch.dict(os.environ, {"TERM": "xterm", "NO_COLOR": ""}), contextlib.chdir(ROOT):
        with contextlib.redirect_stdout(stream):
            tilecast(ADVISE)
        text = Text.from_ansi(stream.getvalue())
        width = max(len(line) for line in text.plain.splitlines())
        console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
        console.print(Text("$ tilecast " + " ".join(ADVISE) + "\n"))
        console.print(text)
        picture = console.export_svg(title="tilecast", unique_id="first-screen")
    return re.sub(r"\s*(<!--.*?-->|@font-face \{.*?\})", "", picture, flags=re.DOTALL)


def photograph_pages(folder: Path) -> None:
    """Write a picture of the report and of the queue for every window into the folder.

    Raises:
        SystemExit: no Chromium is installed.
    """
    program = find_chromium()
    if program is None:
        sys.exit("pictures of pages need Chromium: install chromium, or leave out --pages")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for page, arguments in (("report", ADVISE), ("queue", QUEUE)):
            stream = io.StringIO()
            with contextlib.redirect_stdout(stream), contextlib.chdir(ROOT):
                tilecast((*arguments, "-o", "html"))
            source = Path(scratch) / f"{page}.html"
            source.write_text(stream.getvalue(), encoding="utf-8")
            for window, (size, scheme) in WINDOWS.items():
                subprocess.run(
                    [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                     f"--user-data-dir={scratch}/profile", f"--blink-settings=preferredColorScheme={scheme}",
                     f"--window-size={size}", f"--screenshot={folder / page}-{window}.png", source.as_uri()],
                    check=True, capture_output=True,
                )  # fmt: skip


def main() -> None:
    """Write the first screen, and the pictures of pages if a folder for them is given."""
    parser = argparse.ArgumentParser(description="Make the pictures of a release.")
    parser.add_argument("--pages", type=Path, metavar="DIR", help="folder for the pictures of pages; needs Chromium")
    arguments = parser.parse_args()
    FIRST_SCREEN.write_text(draw_first_screen(), encoding="utf-8")
    if arguments.pages is not None:
        photograph_pages(arguments.pages)


if __name__ == "__main__":
    main()
