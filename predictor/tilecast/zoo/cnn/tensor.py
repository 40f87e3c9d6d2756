"""The state of a walk through a convolutional network.

It is the shape of the current tensor, the operators written so far, and the bytes that training keeps alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from tilecast.graph import OperatorList
from tilecast.spec import Floats
from tilecast.zoo.numerics import Numerics

Size: TypeAlias = tuple[int, int, int]
"""Depth, height and width in pixels. The depth of a flat image is 1."""


@dataclass(slots=True)
class Tensor:
    """The current tensor of a network under construction, and what was written so far.

    Its shape is (batch, channels, *size), where `batch` is a column over shards, (S,). `parameters` counts weights.
    `activation_bytes` counts the bytes that stay alive until the backward pass, (S,).
    """

    numerics: Numerics
    batch: Floats
    channels: int
    size: Size
    flat: bool = True
    """Whether images, and therefore kernels, have no depth."""
    ops: OperatorList = field(default_factory=OperatorList)
    parameters: float = 0.0
    activation_bytes: Floats = field(default_factory=lambda: np.zeros(1))
    workspace: Floats = field(default_factory=lambda: np.zeros(1))
    """Bytes of the input and the output of the largest convolution, (S,).

    cuDNN copies both into another layout for the tensor cores.
    """
    peak: Floats = field(default_factory=lambda: np.zeros(1))
    """Largest number of bytes alive during the backward pass, (S,).

    At each operator these are the bytes kept so far, the gradients of what the operator reads and writes, and the
    workspace of a convolution, which comes from PyTorch's allocator too (ATen, native/cudnn/ConvShared.cpp).
    """
    held: bool = False
    """Whether another branch that reads the current tensor keeps it already."""
    reached: bool = False
    """Whether a gradient flows into the current tensor. None flows into the image or the output of frozen layers."""
    normed: bool = False
    """Whether a norm made the current tensor. The norm can be fused with the operators that follow."""
    fixed_norms: bool = False
    """Whether norms are fixed scales and offsets, as in the pretrained backbones of detectors."""

    def __post_init__(self) -> None:
        # These networks have no adapters: all their weights are trained, also beside a model that has adapters.
        self.numerics = replace(self.numerics, frozen=False)

    @property
    def elements(self) -> Floats:
        """Elements of the current tensor, (S,)."""
        return self.batch * self.channels * self.size[0] * self.size[1] * self.size[2]

    @property
    def shape(self) -> tuple[int, Size]:
        """Channels and size of the current tensor. Assign it to return to an earlier tensor."""
        return self.channels, self.size

    @shape.setter
    def shape(self, shape: tuple[int, Size]) -> None:
        self.channels, self.size = shape

    def keep(self, elements: Floats) -> None:
        """Keep `elements` (S,) alive until the backward pass."""
        if self.numerics.training:
            self.activation_bytes = self.activation_bytes + elements * self.numerics.element

    def differentiate(self, elements: Floats) -> None:
        """Raise `peak` to the bytes alive while the latest operator runs backward with gradients of `elements` (S,)."""
        if self.numerics.training:
            self.peak = np.maximum(self.peak, self.activation_bytes + elements * self.numerics.element)

    @property
    def working(self) -> Floats:
        """Bytes that the backward pass needs at its peak, beyond all that is kept, (S,)."""
        return np.maximum(self.peak - self.activation_bytes, 0.0)

    def again(self, shape: tuple[int, Size]) -> None:
        """Return to an earlier tensor that another branch has read and therefore keeps."""
        self.shape, self.held = shape, True

    def read(self) -> None:
        """Keep the current tensor as the input of an operator whose gradient needs it, unless it is kept already."""
        if not self.held:
            self.keep(self.elements)
        self.held = False

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Write the layers inside the context as untrained: they run forward only and keep nothing."""
        numerics = self.numerics
        self.numerics = replace(numerics, training=False)
        yield
        self.numerics, self.reached = numerics, False

    def after(self, window: Size, stride: int | tuple[int, int], padding: int | None) -> Size:
        """Return the size after a window has moved over the current tensor.

        Without `padding` each side shrinks to ceil(size / stride).
        """
        strides = (stride,) * 3 if isinstance(stride, int) else (1, *stride)
        pairs = zip(self.size, strides, strict=True)
        if padding is None:
            depth, height, width = (-(-extent // step) for extent, step in pairs)
        else:
            depth, height, width = (
                (extent + 2 * padding - side) // step + 1 for (extent, step), side in zip(pairs, window, strict=True)
            )
        return (1 if self.flat else max(depth, 1), max(height, 1), max(width, 1))
