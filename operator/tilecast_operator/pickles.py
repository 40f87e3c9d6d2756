"""Pickle values without the objects that the reader already has."""

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
    """Return a pickle of a value without the objects in `shared`. `load` needs equal objects in the same order."""
    numbers = {id(one): number for number, one in enumerate(shared)}
    return _pickle(value, lambda part: numbers.get(id(part)))


def load(data: bytes, shared: Sequence[object]) -> Any:
    """Return the value in a pickle from `dump`."""
    return _Unpickler(io.BytesIO(data), shared).load()


def measure_pickled_size(value: object, shared: type | tuple[type, ...]) -> int:
    """Return the size of a value's pickle in bytes, without parts of the types in `shared`."""
    return len(_pickle(value, lambda part: 0 if isinstance(part, shared) and part is not value else None))


def _pickle(value: object, name: Callable[[object], int | None]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, name).dump(value)
    return file.getvalue()
