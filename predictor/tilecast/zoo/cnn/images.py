"""Dimensions of a sample, as an image, which all networks of `tilecast.zoo.cnn` have."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model import Dimensions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Images(Dimensions):
    """Dimensions of a sample: an image, a volume, or a sequence stored as an image of height 1."""

    image: int
    """Height, in pixels."""
    image_width: int | None = None
    """Width in pixels. None for a square image."""
    image_depth: int = 1
    """Depth of a volume, in voxels."""
    image_channels: int = 3
    """Numbers of a pixel."""
    largest_image: int | None = None
    """Height of the largest image, assumed for memory if images differ in size. None if all are equal."""
    largest_image_width: int | None = None
    """Width of the largest image. None if it is square."""

    @property
    def width_pixels(self) -> int:
        """Width, in pixels."""
        return self.image if self.image_width is None else self.image_width


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Classifier(Images):
    """Dimensions of an image classifier. Classifiers with fixed layers have no further dimensions."""

    classes: int = 1000
