"""Pickles of what refers to things that whoever reads them has already."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, name: Callable[[object], int | None]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._name = name

    def persistent_id(self, value: object) -> int | None:
        return self._name(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, number: int) -> object:
        return self._shared[number]


def dump(value: object, shared: Sequence[object]) -> bytes:
    """The pickle of a value, in which `shared` are left out: `load` needs as many of them in the same order."""
    numbers = {id(one): number for number, one in enumerate(shared)}
    return _pickled(value, lambda part: numbers.get(id(part)))


def load(data: bytes, shared: Sequence[object]) -> Any:
    """The value of a pickle that `dump` made in a process of ours."""
    return _Unpickler(io.BytesIO(data), shared).load()


def weight(value: object, shared: type | tuple[type, ...]) -> int:
    """Bytes of a value's pickle, those of the types left out that it shares with others; it takes a few times as many
    in memory."""
    return len(_pickled(value, lambda part: 0 if isinstance(part, shared) and part is not value else None))


def _pickled(value: object, name: Callable[[object], int | None]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, name).dump(value)
    return file.getvalue()
