"""The tensor that walks through a convolutional network, and what training keeps of those before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from tilecast.graph import OperatorList
from tilecast.models.numerics import Numerics
from tilecast.spec import Floats

Size: TypeAlias = tuple[int, int, int]
"""Depth, height and width in pixels; the depth of a flat image is 1."""


@dataclass(slots=True)
class Tensor:
    """The tensor in hand of a network under construction, of shape (batch, channels, *size), where `batch` is a column
    over shards, (S,); and what was written so far. `parameters` counts weights, `activation_bytes`
    the bytes alive until the backward pass, (S,)."""

    numerics: Numerics
    batch: Floats
    channels: int
    size: Size
    flat: bool = True
    """Whether images have no depth, so that kernels have none either."""
    ops: OperatorList = field(default_factory=OperatorList)
    parameters: float = 0.0
    activation_bytes: Floats = field(default_factory=lambda: np.zeros(1))
    workspace: Floats = field(default_factory=lambda: np.zeros(1))
    """Bytes of the input and the output of the largest convolution, (S,): cuDNN lays both out anew for the matrix
    units."""
    peak: Floats = field(default_factory=lambda: np.zeros(1))
    """Bytes alive in the backward pass at its fullest, (S,): of some operator what was kept up to it, the gradients of
    what it reads and writes, and the workspace of a convolution, which PyTorch's allocator hands out too (ATen,
    native/cudnn/ConvShared.cpp)."""
    held: bool = False
    """Whether the tensor in hand is kept already, by another branch that reads it."""
    reached: bool = False
    """Whether a gradient flows into the tensor in hand: not into the image, nor into what frozen layers made."""
    normed: bool = False
    """Whether a norm made the tensor in hand, which can take what follows along."""
    fixed_norms: bool = False
    """Whether norms are fixed scales and offsets, as detectors keep those of a pretrained backbone."""

    def __post_init__(self) -> None:
        # Nothing in these networks has adapters: their weights are trained beside a model that has some.
        self.numerics = replace(self.numerics, frozen=False)

    @property
    def elements(self) -> Floats:
        """Elements of the tensor in hand, (S,)."""
        return self.batch * self.channels * self.size[0] * self.size[1] * self.size[2]

    @property
    def shape(self) -> tuple[int, Size]:
        """Channels and size of the tensor in hand; assign it to return to an earlier tensor."""
        return self.channels, self.size

    @shape.setter
    def shape(self, shape: tuple[int, Size]) -> None:
        self.channels, self.size = shape

    def keep(self, elements: Floats) -> None:
        """Tensors of so many elements stay alive until the backward pass."""
        if self.numerics.training:
            self.activation_bytes = self.activation_bytes + elements * self.numerics.element

    def differentiate(self, elements: Floats) -> None:
        """Gradients of so many elements are alive while an operator, the last to keep something, runs backward."""
        if self.numerics.training:
            self.peak = np.maximum(self.peak, self.activation_bytes + elements * self.numerics.element)

    @property
    def working(self) -> Floats:
        """What the backward pass needs at its fullest beside all that is kept, in bytes, (S,)."""
        return np.maximum(self.peak - self.activation_bytes, 0.0)

    def again(self, shape: tuple[int, Size]) -> None:
        """Returns to an earlier tensor that another branch has read, and so keeps."""
        self.shape, self.held = shape, True

    def read(self) -> None:
        """The tensor in hand is the input of an operator whose gradient needs it."""
        if not self.held:
            self.keep(self.elements)
        self.held = False

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Layers written inside are not trained: they run forward only and keep nothing."""
        numerics = self.numerics
        self.numerics = replace(numerics, training=False)
        yield
        self.numerics, self.reached = numerics, False

    def after(self, window: Size, stride: int | tuple[int, int], padding: int | None) -> Size:
        """The size behind such a window; without `padding` ceil(size / stride) a side."""
        strides = (stride,) * 3 if isinstance(stride, int) else (1, *stride)
        pairs = zip(self.size, strides, strict=True)
        if padding is None:
            depth, height, width = (-(-extent // step) for extent, step in pairs)
        else:
            depth, height, width = (
                (extent + 2 * padding - side) // step + 1 for (extent, step), side in zip(pairs, window, strict=True)
            )
        return (1 if self.flat else max(depth, 1), max(height, 1), max(width, 1))
