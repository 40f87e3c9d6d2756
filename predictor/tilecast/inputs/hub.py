"""Find a model's config.json on the Hugging Face Hub: in the local cache, or else with `huggingface_hub`."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilecast import untrusted
from tilecast.spec import SpecError

PREFIX = "hf://"
MAX_BYTES = 2**20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class HubUnavailableError(SpecError):
    """Error that a model cannot be fetched: the Hub cannot be reached, or `huggingface_hub` is not installed."""


@dataclass(frozen=True, slots=True)
class HubConfig:
    """The config.json of a model on the Hub, and the commit it comes from."""

    name: str
    revision: str
    config: Mapping[str, Any]

    @property
    def note(self) -> str:
        """Sentence that names the model and its revision, which is the commit."""
        return f"The model is {self.name} of the Hugging Face Hub at revision {self.revision}."


def is_hub_name(name: str) -> bool:
    """Return whether a name is `hf://org/name`, or `org/name` if no such path exists. `@REVISION` may follow."""
    plain = name.removeprefix(PREFIX).partition("@")[0]
    return name.startswith(PREFIX) or (_NAME.fullmatch(plain) is not None and not os.path.exists(name))  # noqa: PTH110


def read_hub_config(name: str) -> HubConfig:
    """Return the config.json of a model on the Hub. The local cache is read first.

    Raises:
        HubUnavailableError: the model is not in the cache and cannot be fetched from the Hub.
        SpecError: the name is malformed, or the model's config.json is invalid.
    """
    plain, at, revision = name.removeprefix(PREFIX).partition("@")
    if _NAME.fullmatch(plain) is None or (at and _REVISION.fullmatch(revision) is None):
        remedy = "write hf://ORG/NAME or hf://ORG/NAME@REVISION"
        raise SpecError(name[:120], "is no name on the Hugging Face Hub", remedy)
    found = _find_in_cache(_find_cache_folder(), plain, revision or "main") or _download_config(
        name, plain, revision or None
    )
    path, commit = found
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SpecError(name, "its config.json cannot be read", str(error.strerror or error)) from None
    if len(text) > MAX_BYTES:
        raise SpecError(
            name, f"its config.json is longer than {MAX_BYTES // 2**20} MiB", "give a shorter one as a file"
        )
    config = untrusted.parse_json_mapping(text, name, "its config.json", "give a config.json as a file")
    return HubConfig(plain, commit, config)


def _find_cache_folder() -> Path:
    """Return the folder in which `huggingface_hub` caches files, as its environment variables set it."""
    if stated := os.environ.get("HF_HUB_CACHE"):
        return Path(stated)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("HF_HOME") or caches / "huggingface") / "hub"


def _find_in_cache(folder: Path, name: str, revision: str) -> tuple[Path, str] | None:
    """Return the path of a config.json in the cache and its commit, or None.

    Links that leave the model's folder are ignored.
    """
    model = folder / f"models--{name.replace('/', '--')}"
    try:
        reference = model / "refs" / revision
        commit = reference.read_text(encoding="utf-8")[:100].strip() if reference.is_file() else revision
        path = model / "snapshots" / commit / "config.json"
        if _REVISION.fullmatch(commit) is None or not path.is_file():
            return None
        return (path, commit) if path.resolve().is_relative_to(model.resolve()) else None
    except (OSError, UnicodeDecodeError):
        return None


def _download_config(name: str, plain: str, revision: str | None) -> tuple[Path, str]:
    """Return the path and the commit of a config.json that `huggingface_hub` fetched.

    Raises:
        HubUnavailableError: the package is not installed, or the Hub does not give the file.
    """
    try:
        import huggingface_hub
    except ImportError:
        problem = "is not in the local cache of the Hugging Face Hub, and huggingface_hub is not installed"
        remedy = "give its config.json, or install the extra: pip install 'tilecast[hub]'"
        raise HubUnavailableError(name, problem, remedy) from None
    try:
        # The package sets its own level of logging when this name is first looked up.
        download = huggingface_hub.hf_hub_download
        with _silence_package():
            path = Path(download(plain, "config.json", revision=revision))
    # The package raises errors of several HTTP libraries, whose classes changed between its versions.
    except Exception as error:
        if type(error).__name__ == "LocalEntryNotFoundError":
            problem = "is not in the local cache, and the Hugging Face Hub cannot be reached"
            raise HubUnavailableError(name, problem, "check the network, or give its config.json as a file") from None
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        remedy = "check the name and the network, log in if it is gated, or give its config.json"
        raise HubUnavailableError(name, f"cannot be fetched from the Hugging Face Hub ({reason})", remedy) from None
    return path, path.parent.name


@contextmanager
def _silence_package() -> Iterator[None]:
    """Keep `huggingface_hub` from logging each of its attempts. Its error says the same."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
