"""Formats of logs, one module each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilecast.logs.formats import (
    deepspeed,
    lightning_csv,
    maxtext,
    megatron,
    mlflow,
    mlflow_database,
    nanogpt,
    nemo,
    tensorboard,
    torchtitan,
    torchtune,
    tqdm,
    trainer_state,
    wandb,
)
from tilecast.logs.steps import LoggedRun
from tilecast.logs.text import TextFormat

TEXT_FORMATS: Sequence[TextFormat] = (
    megatron.FORMAT,
    maxtext.FORMAT,
    deepspeed.FORMAT,
    nemo.FORMAT,
    nanogpt.FORMAT,
    torchtitan.FORMAT,
    torchtune.FORMAT,
    tqdm.FORMAT,
)
"""Formats of text lines, in the order in which they are tried. The first one that finds steps is used."""


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A log format that is recognised from the name and first bytes of a file, and read as a whole file."""

    name: str
    recognise: Callable[[Path, bytes], bool]
    """Function that returns whether a file with these first bytes has the format."""
    read: Callable[[Path], LoggedRun | None]


FILE_FORMATS: Sequence[FileFormat] = (
    FileFormat(wandb.NAME, wandb.recognise, wandb.read),
    FileFormat(tensorboard.NAME, tensorboard.recognise, tensorboard.read),
    FileFormat(lightning_csv.NAME, lightning_csv.recognise, lightning_csv.read),
    FileFormat(mlflow_database.NAME, mlflow_database.recognise, mlflow_database.read),
    FileFormat(trainer_state.NAME, trainer_state.recognise, trainer_state.read),
)
FOLDER_FILES: Mapping[str, str] = {
    wandb.NAME: wandb.PATTERN,
    tensorboard.NAME: tensorboard.PATTERN,
    mlflow.NAME: mlflow.PATTERN,
    mlflow_database.NAME: mlflow_database.PATTERN,
    trainer_state.NAME: "trainer_state.json",
    lightning_csv.NAME: "metrics.csv",
}
"""Names of files by which a run is found in a folder, in the order in which they are tried."""
NAMES: Sequence[str] = tuple(
    dict.fromkeys([*(item.name for item in TEXT_FORMATS), *(item.name for item in FILE_FORMATS), mlflow.NAME])
)

__all__ = [
    "FILE_FORMATS",
    "FOLDER_FILES",
    "NAMES",
    "TEXT_FORMATS",
    "FileFormat",
    "mlflow",
    "mlflow_database",
    "tensorboard",
]
