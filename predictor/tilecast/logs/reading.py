"""Read the log of a run: a file of any known format, or the folder of an experiment tracker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tilecast.logs.formats import FILE_FORMATS, FOLDER_FILES, NAMES, TEXT_FORMATS, mlflow, mlflow_database, tensorboard
from tilecast.logs.steps import LoggedRun
from tilecast.logs.text import find_logged_run, iterate_lines
from tilecast.spec import SpecError

MAX_BYTES = 1 << 28
"""Largest log that is read, in bytes."""
MAX_DEPTH = 6
"""Levels of folders below the named one that are searched."""
MAX_ENTRIES = 20_000
"""Most files in a folder."""
HEAD = 4096
_REMEDY = "give the seconds of a step, for instance 1.9s"


def read_log(name: str) -> LoggedRun:
    """Return the run in a log: the median of its steady steps, and what the log says about GPUs and plan.

    Nothing is executed, and no link in a folder is followed.

    Args:
        name: path of a log, of a folder that contains one run, or of a run in a database (`mlflow.db/RUN`).

    Raises:
        SpecError: the log cannot be read, is larger than `MAX_BYTES`, or contains too few steps.
    """
    path = Path(name)
    try:
        if path.is_dir():
            return _read_folder(path)
        if not path.exists() and _is_database(path.parent):
            return _read_file(path.parent, path.name)
        if not path.is_file():
            problem = "is no file" if path.exists() else "cannot be read: there is no such file"
            raise SpecError(name, problem, "name a log")
        return _read_file(path)
    except OSError as error:
        raise SpecError(name, "cannot be read", str(error.strerror or error)) from None


def _is_database(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as handle:
        return mlflow_database.recognise(path, handle.read(HEAD))


def _read_file(path: Path, run_of_database: str = "") -> LoggedRun:
    _check_size(path, path)
    with path.open("rb") as handle:
        head = handle.read(HEAD)
    found = next((item for item in FILE_FORMATS if item.recognise(path, head)), None)
    if run_of_database:
        run = mlflow_database.read(path, run_of_database)
    else:
        run = None if found is None else found.read(path)
    if run is None and (found is None or b"\0" not in head):
        if found is None and b"\0" in head:
            remedy = "give a text log, an event file of TensorBoard, a run-….wandb, or an mlflow.db"
            raise SpecError(str(path), "is a binary file of no known format", remedy)
        run = find_logged_run(iterate_lines(path), TEXT_FORMATS)
    if run is None:
        known = ", ".join(NAMES) if found is None else found.name
        raise SpecError(str(path), f"shows no steps of {known}, or too few", _REMEDY)
    return run


def _read_folder(path: Path) -> LoggedRun:
    """Return the run in a folder, by the first format that matches any of its files."""
    files = list(_iterate_files(path))
    for name, pattern in FOLDER_FILES.items():
        found = sorted(file for file in files if file.match(pattern))
        if name == mlflow.NAME:
            found = [file.parent for file in found if mlflow.is_run(file.parent)]
        if name == tensorboard.NAME and len({file.parent for file in found}) == 1:
            for file in found:
                _check_size(file, path)
            # A run that was restarted has a file for each start, whose name has the time.
            run = tensorboard.read(*found)
        elif len(found) == 1:
            run = mlflow.read(found[0]) if name == mlflow.NAME else _read_file(found[0])
        elif found:
            problem = f"has {len(found)} runs of {name}"
            raise SpecError(str(path), problem, f"name one of them, for instance {found[-1].relative_to(path)}")
        else:
            continue
        if run is None:
            raise SpecError(str(path), f"shows no steps of {name}, or too few", _REMEDY)
        return run
    known = ", ".join(FOLDER_FILES)
    raise SpecError(str(path), f"is a folder without a run of {known}", "name a log")


def _iterate_files(root: Path) -> Iterator[Path]:
    """Yield the files of a folder down to `MAX_DEPTH`, without links.

    Raises:
        SpecError: there are more than `MAX_ENTRIES`.
    """
    count, base = 0, len(root.parts)
    for folder, folders, names in os.walk(root):
        at = Path(folder)
        if len(at.parts) - base >= MAX_DEPTH:
            folders.clear()
        folders.sort()
        count += len(names) + len(folders)
        if count > MAX_ENTRIES:
            raise SpecError(str(root), f"has more than {MAX_ENTRIES:,} files", "name the folder of one run")
        for name in names:
            file = at / name
            if not file.is_symlink() and file.is_file():
                yield file


def _check_size(path: Path, named: Path) -> None:
    if (size := path.stat().st_size) > MAX_BYTES:
        raise SpecError(str(named), f"has {size:,} bytes, more than {MAX_BYTES:,}", "give its last lines")
