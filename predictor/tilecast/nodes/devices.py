"""Devices that a driver of Dynamic Resource Allocation publishes in ResourceSlices."""

from __future__ import annotations

from dataclasses import dataclass

VERSION = "version:"
"""Before an attribute that is a semantic version."""


@dataclass(frozen=True, slots=True)
class PublishedDevice:
    """A device of a ResourceSlice, without the attributes that tell equal devices apart."""

    kind: str
    """Whole GPU or slice of one, as labels.toml spells them."""
    product: str
    attributes: tuple[tuple[str, bool | int | str], ...] = ()
    """By qualified name, sorted; a version stands as `version:1.2.3`."""
    capacity: tuple[tuple[str, int], ...] = ()
    """In bytes or pieces, by qualified name, sorted."""
