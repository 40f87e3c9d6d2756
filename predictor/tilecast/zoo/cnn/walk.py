"""Builder for the graphs of convolutional networks.

A walk carries a tensor shape through the network and collects operators, parameters and the bytes that training keeps.
`Operators` has the single operators, `Walk` adds the usual blocks of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tilecast.spec import Floats, PassName
from tilecast.zoo import layers
from tilecast.zoo.cnn.tensor import Tensor

_SMOOTH = ("silu", "hard-swish", "prelu", "leaky-relu", "gelu", "tanh")


@dataclass(slots=True)
class Operators(Tensor):
    """Methods that write one operator each.

    Each appends the operator's kernels, parameters and kept bytes, and makes its output the current tensor.
    """

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
        """Write a convolution, forward and backward.

        The input has a gradient only if a gradient flows into it; the weight always has one. `kernel` and `stride` are
        one side or (height, width). Without `padding` each side shrinks to ceil(size / stride) pixels.
        """
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        window = (1 if self.flat else height, height, width)
        size = self.after(window, stride, padding)
        dims: dict[str, Floats | float] = {
            "batch": self.batch, "c_in": self.channels, "c_out": out,
            "in_d": self.size[0], "in_h": self.size[1], "in_w": self.size[2],
            "k_d": window[0], "k_h": window[1], "k_w": window[2],
            "out_d": size[0], "out_h": size[1], "out_w": size[2], "groups": groups,
        }  # fmt: skip
        name = f"conv{len(self.ops)}"
        pixels = self.channels * self.size[0] * self.size[1] * self.size[2] + out * size[0] * size[1] * size[2]
        self.workspace = np.maximum(self.workspace, self.numerics.element * self.batch * pixels)
        self.read()
        self.normed = False
        self.differentiate(2 * self.batch * pixels)
        self.ops += layers.convolution(name, self.numerics, dims, input_gradient=self.reached)
        self.parameters += out * self.channels / groups * window[0] * window[1] * window[2]
        self.channels, self.size, self.reached = out, size, True
        if bias:
            self.bias(name)

    def bias(self, name: str) -> None:
        """Write a bias for each channel, which the kernel that made the current tensor adds.

        Only its gradient is a kernel of its own.
        """
        self.parameters += self.channels
        if self.numerics.training:
            self.ops += layers.elementwise(
                f"{name}.bias-gradient", self.numerics, self.elements, 1, 0, phase="backward"
            )

    def norm(self) -> None:
        """Write a batch or instance norm.

        A fixed norm is a product and a sum, whose gradients do not need the input.
        """
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
        """Write a product with a constant, either one for all channels or one per channel."""
        self.ops += layers.fused_away(
            "elementwise", layers.pointwise("scale", self.numerics, self.elements, backward=(1.0, 1.0))
        )

    def activate(self, activation: str = "relu") -> None:
        """Write an activation in place.

        The gradient of ReLU needs only its output, which the next layer keeps. The activations in `_SMOOTH` keep their
        input as well.
        """
        if activation == "none":
            return
        if activation in _SMOOTH:
            self.keep(self.elements)
        fusing: PassName = "batchnorm" if self.normed else "elementwise"
        self.ops += layers.fused_away(fusing, layers.pointwise(activation, self.numerics, self.elements))

    def add(self) -> None:
        """Write the sum with a branch of the same shape, and backward the sum of the gradients where the branches part.

        A norm that is fused with the sum also reads the branch and writes its gradient.
        """
        ops = layers.pointwise("add", self.numerics, self.elements, reads=2.0, backward=(2.0, 1.0))
        if self.normed:
            along = layers.pointwise("add", self.numerics, self.elements, writes=0.0, backward=(2.0, 1.0))
            ops = layers.fused_into("batchnorm", ops, [replace(op, launches=0.0) for op in along])
        self.ops += ops

    def concatenate(self, channels: int) -> None:
        """Write the concatenation of branches of the same size, which has `channels` in total."""
        self.channels = channels
        self.ops += layers.pointwise("concatenate", self.numerics, self.elements, backward=(1.0, 1.0))

    def fork(self, branches: int) -> None:
        """Let several branches read the current tensor, and write the sum of their gradients."""
        if self.numerics.training:
            self.ops += layers.elementwise(
                "fork.gradient", self.numerics, self.elements, 2, 1, phase="backward", count=branches - 1.0
            )

    def pool(self, kernel: int, stride: int, *, padding: int | None = None, average: bool = False) -> None:
        """Write a maximum or average over windows.

        Both keep their input. The maximum also keeps an index of 8 bytes per output element.
        """
        before = self.elements
        self.read()
        window = (1 if self.flat else kernel, kernel, kernel)
        self.size = self.after(window, stride, padding)
        ratio = float(np.mean(self.elements / before)) if len(before) else 1.0
        if not average:
            self.keep(self.elements * 8.0 / self.numerics.element)
        self.ops += layers.pool("pool", self.numerics, before, ratio)

    def mean(self) -> None:
        """Write the mean over all pixels."""
        self.ops += layers.pointwise(
            "mean", self.numerics, self.elements, writes=0.0, absorbed=False, backward=(0.0, 1.0)
        )
        self.size = (1, 1, 1)

    def resize(self, share: float) -> None:
        """Write the interpolation of the current tensor from one with `share` of its pixels."""
        self.ops += layers.pointwise("resize", self.numerics, self.elements, reads=share, backward=(1.0, share))

    def linear(self, out: int, *, bias: bool = False) -> None:
        """Write a dense layer over all channels and pixels of a sample."""
        inputs = self.channels * self.size[0] * self.size[1] * self.size[2]
        self.keep(self.elements)
        self.differentiate(self.batch * (inputs + out))
        self.ops += layers.linear("dense", self.numerics, self.batch, inputs, out, bias=bias)
        self.parameters += inputs * out + (out if bias else 0)
        self.channels, self.size = out, (1, 1, 1)

    def products(self, rows: float, cols: float, depth: float) -> None:
        """Write a matrix product per sample, [rows, depth] times [depth, cols], and its two gradients."""
        shapes = (("", rows, cols, depth), ("", rows, depth, cols), ("", depth, cols, rows))
        self.ops += layers.products("product", self.numerics, self.batch, *shapes, selective=False)

    def dropout(self) -> None:
        """Write dropout with a mask of one byte per element, in training only."""
        if self.numerics.training:
            self.keep(self.elements / self.numerics.element)
            self.ops += layers.pointwise("dropout", self.numerics, self.elements, mask_bytes=1.0, backward=(1.0, 1.0))

    def loss(self, classes: int | None = None) -> None:
        """Write softmax cross-entropy over `classes` (by default the channels) at every pixel, in training only."""
        if self.numerics.training:
            cols = float(classes or self.channels)
            self.ops += layers.cross_entropy("loss", self.numerics, self.elements / cols, np.full(1, cols))


@dataclass(slots=True)
class Walk(Operators):
    """A network under construction, with methods for single operators and for the usual blocks of them."""

    def up_conv(self, out: int) -> None:
        """Write a transposed convolution of kernel and stride 2.

        Every pixel becomes 2 x 2 (x 2) pixels of `out` channels. This equals a 1 x 1 convolution to 4 (8) times `out`
        channels that are then spread over the pixels.
        """
        depth, height, width = self.size
        corners = 4 if self.flat else 8
        self.conv(out * corners, 1)
        self.channels, self.size = out, (depth if self.flat else 2 * depth, 2 * height, 2 * width)
        self.bias("up-conv")

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
        """Write a convolution, a norm and an activation ("none" for no activation)."""
        self.conv(out, kernel, stride, groups=groups, padding=padding)
        self.norm()
        self.activate(activation)

    def upsample(self) -> None:
        """Write nearest-neighbour interpolation to twice the height and width."""
        depth, height, width = self.size
        self.size = (depth, 2 * height, 2 * width)
        self.resize(0.25)

    def separable(self, out: int, kernel: int | tuple[int, int] = 3, stride: int = 1) -> None:
        """Write a depthwise convolution, then a 1 x 1 convolution with a bias."""
        self.conv(self.channels, kernel, stride, groups=self.channels)
        self.conv(out, 1, bias=True)

    def excite(self, hidden: int, activation: str = "relu") -> None:
        """Write squeeze-and-excitation: a global mean, two small dense layers with biases, and a scale."""
        self.ops += layers.pointwise("squeeze", self.numerics, self.elements, writes=0.0, absorbed=False)
        self.ops += layers.linear("squeeze.down", self.numerics, self.batch, self.channels, hidden)
        self.ops += layers.pointwise(activation, self.numerics, self.batch * hidden)
        self.ops += layers.linear("squeeze.up", self.numerics, self.batch, hidden, self.channels)
        self.ops += layers.pointwise("sigmoid", self.numerics, self.batch * self.channels)
        self.ops += layers.pointwise("excite", self.numerics, self.elements, absorbed=False, backward=(3.0, 1.0))
        self.parameters += 2 * self.channels * hidden + hidden + self.channels
        self.keep(self.elements)

    def dense(self, out: int) -> None:
        """Write a dense layer with a bias over all channels and pixels of a sample."""
        self.linear(out, bias=True)

    def classify(self, classes: int, *, dropout: bool = False) -> None:
        """Write the usual end of a classifier: a global mean, dropout on request, a dense layer and the loss."""
        self.mean()
        if dropout:
            self.dropout()
        self.dense(classes)
        self.loss()
