"""Split messages of Protocol Buffers into their fields, without a schema."""

from __future__ import annotations

import struct
from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types of Protocol Buffers."""


class MessageError(ValueError):
    """Error that bytes are not a Protocol Buffers message."""


def iterate_fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Yield number, wire type and value of each field. Fixed-width values are bytes.

    Raises:
        MessageError: the bytes are not a message.
    """
    at, end = 0, len(data)
    while at < end:
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = _read_varint(data, at)
            yield number, kind, value
            continue
        if kind == BYTES:
            size, at = _read_varint(data, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise MessageError(f"wire type {kind}")
        if at + size > end:
            raise MessageError("cut off")
        yield number, kind, data[at : at + size]
        at += size


def list_messages(data: bytes, number: int) -> list[bytes]:
    """Return the values of a bytes field. They may be messages or texts."""
    return [value for found, _, value in iterate_fields(data) if found == number and isinstance(value, bytes)]


def read_float(data: bytes) -> float:
    """Return the number in 4 or 8 bytes."""
    number: float = struct.unpack("<f" if len(data) == 4 else "<d", data)[0]
    return number


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise MessageError("cut off")
