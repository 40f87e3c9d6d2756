"""Devices that a Dynamic Resource Allocation driver publishes in ResourceSlices."""

from __future__ import annotations

from dataclasses import dataclass

VERSION = "version:"
"""Prefix of an attribute that is a semantic version."""


@dataclass(frozen=True, slots=True)
class PublishedDevice:
    """A device of a ResourceSlice. It has no serial number or the like, so that devices of equal products are equal."""

    kind: str
    """Whole GPU or MIG slice, by the spelling in labels.toml."""
    product: str
    attributes: tuple[tuple[str, bool | int | str], ...] = ()
    """Attributes by qualified name, sorted. A version is written as `version:1.2.3`."""
    capacity: tuple[tuple[str, int], ...] = ()
    """Capacity in bytes or pieces by qualified name, sorted."""
