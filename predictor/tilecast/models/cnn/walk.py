"""The pen with which convolutional networks are written: a tensor shape that walks through the network and leaves
behind operators, parameters and what training keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from tilecast.graph import KernelTable, Op, Phase
from tilecast.models import layers
from tilecast.models.layers import Numerics
from tilecast.spec import Floats, PassName

Size: TypeAlias = tuple[int, int, int]
"""Depth, height and width in pixels; the depth of a flat image is 1."""


_SMOOTH = ("silu", "hard-swish", "prelu", "leaky-relu", "gelu", "tanh")


@dataclass(slots=True)
class Walk:
    """A network under construction. The tensor in hand has shape (batch, channels, *size), where `batch` is a column
    over shards, (S,). `parameters` counts weights, `kept` the bytes alive until the backward pass, (S,)."""

    numerics: Numerics
    batch: Floats
    channels: int
    size: Size
    flat: bool = True
    """Whether images have no depth, so that kernels have none either."""
    ops: list[Op] = field(default_factory=list)
    parameters: float = 0.0
    kept: Floats = field(default_factory=lambda: np.zeros(1))
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
            self.kept = self.kept + elements * self.numerics.element

    def differentiate(self, elements: Floats) -> None:
        """Gradients of so many elements are alive while an operator, the last to keep something, runs backward."""
        if self.numerics.training:
            self.peak = np.maximum(self.peak, self.kept + elements * self.numerics.element)

    @property
    def working(self) -> Floats:
        """What the backward pass needs at its fullest beside all that is kept, in bytes, (S,)."""
        return np.maximum(self.peak - self.kept, 0.0)

    def again(self, shape: tuple[int, Size]) -> None:
        """Returns to an earlier tensor that another branch has read, and so keeps."""
        self.shape, self.held = shape, True

    def _read(self) -> None:
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

    def conv(
        self,
        out: int,
        kernel: int | tuple[int, int] = 3,
        stride: int | tuple[int, int] = 1,
        *,
        groups: int = 1,
        bias: bool = False,
        padding: int | None = None,
    ) -> None:
        """A convolution, forward and both gradients (of the weight alone where no gradient flows further).

        `kernel` and `stride` are a side or (height, width); without `padding` ceil(size / stride) pixels a side remain.
        """
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        window = (1 if self.flat else height, height, width)
        size = self._after(window, stride, padding)
        dims: dict[str, Floats | float] = {
            "batch": self.batch, "c_in": self.channels, "c_out": out,
            "in_d": self.size[0], "in_h": self.size[1], "in_w": self.size[2],
            "k_d": window[0], "k_h": window[1], "k_w": window[2],
            "out_d": size[0], "out_h": size[1], "out_w": size[2], "groups": groups,
        }  # fmt: skip
        name = f"conv{len(self.ops)}"
        pixels = self.channels * self.size[0] * self.size[1] * self.size[2] + out * size[0] * size[1] * size[2]
        self.workspace = np.maximum(self.workspace, self.numerics.element * self.batch * pixels)
        self._read()
        self.normed = False
        self.differentiate(2 * self.batch * pixels)
        self.ops += layers.convolution(name, self.numerics, dims, input_gradient=self.reached)
        self.parameters += out * self.channels / groups * window[0] * window[1] * window[2]
        self.channels, self.size, self.reached = out, size, True
        if bias:
            self._bias(name)

    def up_conv(self, out: int) -> None:
        """A transposed convolution of kernel and stride 2: every pixel becomes 2 x 2 (x 2) pixels of `out` channels,
        which is a 1 x 1 convolution to that many channels, unfolded."""
        depth, height, width = self.size
        corners = 4 if self.flat else 8
        self.conv(out * corners, 1)
        self.channels, self.size = out, (depth if self.flat else 2 * depth, 2 * height, 2 * width)
        self._bias("up-conv")

    def _bias(self, name: str) -> None:
        self.parameters += self.channels
        if self.numerics.training:
            self.ops += layers.elementwise(
                f"{name}.bias-gradient", self.numerics, self.elements, 1, 0, phase="backward"
            )

    def unit(
        self,
        out: int,
        kernel: int | tuple[int, int] = 3,
        stride: int | tuple[int, int] = 1,
        *,
        groups: int = 1,
        padding: int | None = None,
        activation: str = "relu",
    ) -> None:
        """Convolution, normalisation and activation ("none" for none)."""
        self.conv(out, kernel, stride, groups=groups, padding=padding)
        self.norm()
        self.activate(activation)

    def norm(self) -> None:
        """Batch or instance norm; a fixed one is a product and a sum, whose gradient needs no input."""
        if self.fixed_norms:
            self.scale()
            self.ops += layers.fused_away(
                "elementwise", layers.elementwise("offset", self.numerics, self.elements, 1.0, 1.0)
            )
            self.parameters += 2 * self.channels
            return
        self.keep(self.elements)
        self.ops += layers.channel_norm("norm", self.numerics, self.elements, flat=self.flat)
        self.parameters += 2 * self.channels
        self.normed = True

    def scale(self) -> None:
        """A product with a constant, one for all or one per channel."""
        self.ops += layers.fused_away(
            "elementwise", layers.pointwise("scale", self.numerics, self.elements, backward=(1.0, 1.0))
        )

    def activate(self, activation: str = "relu") -> None:
        """An activation in place. The gradient of ReLU needs only its output, which the next layer keeps; others
        (`_SMOOTH`) keep their input besides."""
        if activation == "none":
            return
        if activation in _SMOOTH:
            self.keep(self.elements)
        fusing: PassName = "batchnorm" if self.normed else "elementwise"
        self.ops += layers.fused_away(fusing, layers.pointwise(activation, self.numerics, self.elements))

    def add(self) -> None:
        """Sum with a branch of the same shape; backward, the sum of the gradients where the branches part. The norm
        that takes it along reads the branch and writes its gradient besides."""
        ops = layers.pointwise("add", self.numerics, self.elements, reads=2.0, backward=(2.0, 1.0))
        if self.normed:
            along = layers.pointwise("add", self.numerics, self.elements, writes=0.0, backward=(2.0, 1.0))
            ops = layers.fused_into("batchnorm", ops, [replace(op, launches=0.0) for op in along])
        self.ops += ops

    def concatenate(self, channels: int) -> None:
        """Appends branches of the same size until there are so many channels."""
        self.channels = channels
        self.ops += layers.pointwise("concatenate", self.numerics, self.elements, backward=(1.0, 1.0))

    def fork(self, branches: int) -> None:
        """The tensor in hand goes into several branches, whose gradients are summed."""
        if self.numerics.training:
            self.ops += layers.elementwise(
                "fork.gradient", self.numerics, self.elements, 2, 1, phase="backward", count=branches - 1.0
            )

    def pool(self, kernel: int, stride: int, *, padding: int | None = None, average: bool = False) -> None:
        """Maximum (with an index of 8 bytes for each) or average over windows; both keep their input."""
        before = self.elements
        self._read()
        window = (1 if self.flat else kernel, kernel, kernel)
        self.size = self._after(window, stride, padding)
        ratio = float(np.mean(self.elements / before))
        if not average:
            self.keep(self.elements * 8.0 / self.numerics.element)
        self.ops += layers.pool("pool", self.numerics, before, ratio)

    def mean(self) -> None:
        """The mean over all pixels."""
        self.ops += layers.pointwise(
            "mean", self.numerics, self.elements, writes=0.0, absorbed=False, backward=(0.0, 1.0)
        )
        self.size = (1, 1, 1)

    def upsample(self) -> None:
        """Nearest-neighbour interpolation to twice the height and width."""
        depth, height, width = self.size
        self.size = (depth, 2 * height, 2 * width)
        self.resize(0.25)

    def resize(self, share: float) -> None:
        """The tensor in hand is interpolated from one with that share of its pixels."""
        self.ops += layers.pointwise("resize", self.numerics, self.elements, reads=share, backward=(1.0, share))

    def separable(self, out: int, kernel: int | tuple[int, int] = 3, stride: int = 1) -> None:
        """A depthwise convolution, and one of a single pixel with a bias."""
        self.conv(self.channels, kernel, stride, groups=self.channels)
        self.conv(out, 1, bias=True)

    def excite(self, hidden: int, activation: str = "relu") -> None:
        """Squeeze-and-excitation: a global mean, two small dense layers with biases, and a scale."""
        self.ops += layers.pointwise("squeeze", self.numerics, self.elements, writes=0.0, absorbed=False)
        self.ops += layers.linear("squeeze.down", self.numerics, self.batch, self.channels, hidden)
        self.ops += layers.pointwise(activation, self.numerics, self.batch * hidden)
        self.ops += layers.linear("squeeze.up", self.numerics, self.batch, hidden, self.channels)
        self.ops += layers.pointwise("sigmoid", self.numerics, self.batch * self.channels)
        self.ops += layers.pointwise("excite", self.numerics, self.elements, absorbed=False, backward=(3.0, 1.0))
        self.parameters += 2 * self.channels * hidden + hidden + self.channels
        self.keep(self.elements)

    def dense(self, out: int) -> None:
        """A dense layer with a bias over all that is in hand of a sample."""
        self.linear(out, bias=True)

    def linear(self, out: int, *, bias: bool = False) -> None:
        """A dense layer over all that is in hand of a sample."""
        inputs = self.channels * self.size[0] * self.size[1] * self.size[2]
        self.keep(self.elements)
        self.differentiate(self.batch * (inputs + out))
        self.ops += layers.linear("dense", self.numerics, self.batch, inputs, out, bias=bias)
        self.parameters += inputs * out + (out if bias else 0)
        self.channels, self.size = out, (1, 1, 1)

    def products(self, rows: float, cols: float, depth: float) -> None:
        """A product of matrices for each sample, [rows, depth] with [depth, cols], and its two gradients."""

        def product(m: float, n: float, k: float, phase: Phase) -> Op:
            table = KernelTable.of("gemm", self.numerics.matrix, batch=self.batch, m=m, n=n, k=k)
            return Op("product", table, phase)

        self.ops.append(product(rows, cols, depth, "forward"))
        if self.numerics.training:
            self.ops += [product(rows, depth, cols, "backward"), product(depth, cols, rows, "backward")]

    def dropout(self) -> None:
        """Dropout with a byte mask, in training."""
        if self.numerics.training:
            self.keep(self.elements / self.numerics.element)
            self.ops += layers.pointwise("dropout", self.numerics, self.elements, mask_bytes=1.0, backward=(1.0, 1.0))

    def loss(self, classes: int | None = None) -> None:
        """Softmax cross-entropy over `classes` (by default the channels in hand) at every pixel."""
        if self.numerics.training:
            cols = float(classes or self.channels)
            self.ops += layers.cross_entropy("loss", self.numerics, self.elements / cols, np.full(1, cols))

    def classify(self, classes: int, *, dropout: bool = False) -> None:
        """The usual end of a classifier: a global mean, a dense layer and the loss."""
        self.mean()
        if dropout:
            self.dropout()
        self.dense(classes)
        self.loss()

    def _after(self, window: Size, stride: int | tuple[int, int], padding: int | None) -> Size:
        strides = (stride,) * 3 if isinstance(stride, int) else (1, *stride)
        pairs = zip(self.size, strides, strict=True)
        if padding is None:
            depth, height, width = (-(-extent // step) for extent, step in pairs)
        else:
            depth, height, width = (
                (extent + 2 * padding - side) // step + 1 for (extent, step), side in zip(pairs, window, strict=True)
            )
        return (1 if self.flat else max(depth, 1), max(height, 1), max(width, 1))
