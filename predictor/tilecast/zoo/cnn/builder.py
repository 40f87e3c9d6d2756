"""Builder of convolutional networks.

A builder tracks the shape of the current tensor. Each method appends one operator or one usual block to the network and
makes its output the current tensor. The builder also counts the parameters, and the bytes that are saved for the
backward pass ("kept").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Generic, TypeAlias

import numpy as np

from tilecast.graph import OperatorList
from tilecast.model import DimensionsT
from tilecast.spec import Floats, PassName
from tilecast.zoo import layers
from tilecast.zoo.numerics import PHASES, Numerics
from tilecast.zoo.parts import Linear

Size: TypeAlias = tuple[int, int, int]
"""Depth, height and width in pixels. The depth of a flat image is 1."""
Shape: TypeAlias = tuple[int, Size]
"""Channels and size of a tensor."""
_SMOOTH = ("silu", "hard-swish", "prelu", "leaky-relu", "gelu", "tanh")

_TRANSFORMED = 4.0
"""Ratio of elements in Winograd's transforms to those they read and write: 4 x 4 for 2 x 2 (arXiv 1509.09308)."""
_TRANSFORMED_CHANNELS = 1024
"""Least channels at which cuDNN holds Winograd's transforms in memory in FP32.

Memory peaks of MMSegmentation's heads show it. Kernels for fewer channels keep the transforms in registers.
"""


@dataclass(slots=True)
class NetworkBuilder:
    """A network under construction: its operators, the shape of its current tensor, and the bytes that it saves.

    The current tensor is the output of the latest operator. Its shape is (batch, channels, *size), where `batch` has
    one value per shard, (S,). Bytes are saved for the backward pass.
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
    """Bytes kept until the backward pass, (S,)."""
    workspace: Floats = field(default_factory=lambda: np.zeros(1))
    """Bytes of the input and the output of the largest convolution, (S,).

    cuDNN copies both into another layout for the tensor cores.
    """
    peak: Floats = field(default_factory=lambda: np.zeros(1))
    """Largest number of bytes alive during the backward pass, (S,).

    At each operator these are the bytes kept so far, the gradients of what the operator reads and writes, and the
    workspace of a convolution, which comes from PyTorch's allocator too (ATen, native/cudnn/ConvShared.cpp).
    """
    is_kept: bool = False
    """Whether another branch that reads the current tensor already keeps it."""
    has_gradient: bool = False
    """Whether a gradient flows into the current tensor. None flows into the image or the output of frozen layers."""
    follows_norm: bool = False
    """Whether a norm made the current tensor. The norm can be fused with the operators that follow."""
    is_wide: bool = False
    """Whether the current tensor is in FP32 in a job of 16 bits."""
    adapted: bool = False
    """Whether the job's LoRA adapters apply to the network, so that its own weights may be frozen."""
    linears: list[Linear] = field(default_factory=list)
    """Dense layers over the tokens of samples, which can have adapters."""
    split_norms: bool = False
    """Whether norms are group norms that apply scale and offset in separate passes (PyTorch before 1.4)."""
    fixed_norms: bool = False
    """Whether norms are fixed scales and offsets, as in the pretrained backbones of detectors."""

    def __post_init__(self) -> None:
        # Other networks have no adapters: all their weights are trained, also beside a model that has adapters.
        self.numerics = replace(self.numerics, frozen=self.numerics.frozen and self.adapted)

    @property
    def elements(self) -> Floats:
        """Number of elements in the current tensor, (S,)."""
        return self.batch * self.channels * self.size[0] * self.size[1] * self.size[2]

    @property
    def shape(self) -> Shape:
        """Channels and size of the current tensor. Assign an earlier value to continue from that tensor."""
        return self.channels, self.size

    @shape.setter
    def shape(self, shape: Shape) -> None:
        self.channels, self.size = shape

    def keep_elements(self, elements: Floats) -> None:
        """Count `elements` numbers, (S,), as saved for the backward pass."""
        if self.numerics.training:
            self.activation_bytes = self.activation_bytes + elements * self.numerics.element

    def keep_output(self) -> None:
        """Count the current tensor as saved for the backward pass, because no later layer saves it as its own input.

        The tensor is the output of an activation, whose gradient needs it. No later layer saves it if, for example, it
        is a branch to concatenate or to add, or if dropout or padding copies it.
        """
        self.keep_elements(self.elements)

    def raise_peak(self, elements: Floats) -> None:
        """Raise `peak` to the bytes in memory during the latest operator's backward pass, if these are more.

        These are the bytes saved so far and `elements` gradients, (S,).
        """
        if self.numerics.training:
            self.peak = np.maximum(self.peak, self.activation_bytes + elements * self.numerics.element)

    @property
    def working_bytes(self) -> Floats:
        """Bytes that the backward pass needs at its peak in addition to all saved activations, (S,)."""
        return np.maximum(self.peak - self.activation_bytes, 0.0)

    def continue_from(self, shape: Shape) -> None:
        """Continue from an earlier tensor of shape `shape`, which another branch also reads and has already saved."""
        self.shape, self.is_kept = shape, True

    def keep_input(self) -> None:
        """Count the current tensor as saved for the next operator's gradient, unless a branch already saves it."""
        if not self.is_kept:
            self.keep_elements(self.elements)
        self.is_kept = False

    @contextmanager
    def freeze_layers(self) -> Iterator[None]:
        """Treat the layers added inside this context as frozen: they only run forward and save no activations."""
        numerics = self.numerics
        self.numerics = replace(numerics, training=False)
        yield
        self.numerics, self.has_gradient = numerics, False

    def output_size(self, window: Size, stride: int | tuple[int, ...], padding: int | None) -> Size:
        """Return the output size of a convolution or pooling over the current tensor.

        If `padding` is None, each side becomes ceil(size / stride).
        """
        strides = (stride,) * 3 if isinstance(stride, int) else (1,) * (3 - len(stride)) + stride
        sides = zip(self.size, strides, window, strict=True)
        depth, height, width = (
            -(-extent // step) if padding is None else (extent + 2 * padding - side) // step + 1
            for extent, step, side in sides
        )
        return (1 if self.flat else max(depth, 1), max(height, 1), max(width, 1))

    def _get_window_size(self, kernel: int | tuple[int, ...]) -> Size:
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        depth, height, width = sides if len(sides) == 3 else (sides[0], *sides)
        return (1 if self.flat else depth), height, width

    @property
    def _vector_numerics(self) -> Numerics:
        """The numerics of element-wise operators over the current tensor."""
        return self.numerics.in_fp32 if self.is_wide else self.numerics

    def add_pointwise(self, name: str, elements: Floats | None = None, **options: Any) -> None:
        """Add an element-wise operator over `elements`, (S,), by default over the current tensor.

        The `options` are arguments of `layers.pointwise`.
        """
        elements = self.elements if elements is None else elements
        self.ops += layers.pointwise(name, self._vector_numerics, elements, **options)

    def add_training_pointwise(self, name: str, elements: Floats | None = None, **options: Any) -> None:
        """Add an element-wise operator that runs in training only, such as dropout or a loss."""
        if self.numerics.training:
            self.add_pointwise(name, elements, **options)

    def add_conv(
        self,
        out: int,
        kernel: int | tuple[int, ...] = 3,
        stride: int | tuple[int, ...] = 1,
        *,
        groups: int = 1,
        bias: bool = False,
        padding: int | None = None,
        dilated: bool = False,
    ) -> None:
        """Add a convolution to `out` channels, forward and backward.

        A `dilated` convolution has no Winograd kernel. It is priced as a convolution over the same pixels in one row.

        The weight always has a gradient. The input has a gradient only if `has_gradient` is set. `kernel` and `stride`
        are one side, (height, width) or (depth, height, width). If `padding` is None, each side becomes ceil(size /
        stride).
        """
        window = self._get_window_size(kernel)
        if dilated:
            window = window[0], 1, window[1] * window[2]
        size = self.output_size(window, stride, padding)
        dims = layers.conv_dims(self.batch, (self.channels, *self.size), window, (out, *size), groups)
        name = f"conv{len(self.ops)}"
        pixels = self.channels * prod(self.size) + out * prod(size)
        self.workspace = np.maximum(self.workspace, self.numerics.element * self.batch * pixels)
        self.keep_input()
        self.follows_norm = False
        wide = self.flat and self.channels >= _TRANSFORMED_CHANNELS and self.numerics.matrix == "fp32"
        copies = _TRANSFORMED if wide and window == (1, 3, 3) and size == self.size and groups == 1 else 1.0
        self.raise_peak((1.0 + copies) * self.batch * pixels)
        if self.is_wide:
            # From FP32 to 16 bits, and back.
            self.is_wide = False
            self.add_pointwise(
                "cast",
                self.batch * dims["c_in"] * prod(dims[f"in_{axis}"] for axis in "dhw"),
                reads=2.0,
                backward=(1.0, 2.0),
            )
        self.ops += layers.convolution(name, self.numerics, dims, input_gradient=self.has_gradient)
        self.parameters += out * self.channels / groups * window[0] * window[1] * window[2]
        self.channels, self.size, self.has_gradient = out, size, True
        if bias:
            self.add_bias(name)

    def add_bias(self, name: str) -> None:
        """Add a bias for each channel to the output of the latest operator.

        The forward pass adds the bias inside that operator's kernel. The gradient takes a further kernel.
        """
        self.parameters += self.channels
        if self.numerics.training:
            name = f"{name}.bias-gradient"
            self.ops += layers.elementwise(name, self.numerics, self.elements, 1, 0, phase="backward")

    def add_channel_norm(self, *, keeps_input: bool = True) -> None:
        """Add a batch or instance norm. If `fixed_norms`, add a fixed scale and offset per channel.

        The gradients of a fixed norm do not need its input. If not `keeps_input`, another branch already keeps it.
        """
        self.parameters += 2 * self.channels
        if self.fixed_norms:
            self.add_constant_product()
            offset = layers.elementwise("offset", self.numerics, self.elements, 1.0, 1.0)
            self.ops += layers.drop_when_fused("elementwise", offset)
            return
        if keeps_input:
            self.keep_elements(self.elements)
        if not self.flat and self.numerics.promotes and "channelnorm" in self.numerics.composed:
            # A mean is in FP32, and so is what follows it up to the next convolution (TensorFlow,
            # core/grappler/optimizers/auto_mixed_precision.cc: the deny set is propagated forward).
            self.add_pointwise("cast", writes=2.0, backward=(2.0, 1.0))
            self.is_wide = True
        self.ops += layers.channel_norm("norm", self.numerics, self.elements, flat=self.flat)
        if self.split_norms:
            self.keep_elements(self.elements)
            self.add_pointwise("scale", absorbed=False, backward=(3.0, 1.0))
        self.follows_norm = True

    def add_constant_product(self) -> None:
        """Add a product of the current tensor with a constant or with one constant per channel."""
        product = layers.pointwise("scale", self.numerics, self.elements, backward=(1.0, 1.0))
        self.ops += layers.drop_when_fused("elementwise", product)

    def add_activation(self, activation: str = "relu") -> None:
        """Add an activation in place, or no operator if `activation` is "none".

        The gradient of ReLU needs only its output, which the next layer saves. For activations in `_SMOOTH`, the input
        is saved too. For a hard swish of several kernels, the clipped sum that multiplies the input is also saved.
        """
        if activation == "none":
            return
        if activation in _SMOOTH:
            self.keep_elements(self.elements)
        if activation == "hard-swish" and activation in self.numerics.composed:
            self._add_composed_swish()
            return
        fusing: PassName = "batchnorm" if self.follows_norm else "elementwise"
        self.ops += layers.drop_when_fused(fusing, layers.pointwise(activation, self._vector_numerics, self.elements))

    def _add_composed_swish(self) -> None:
        self.keep_elements(self.elements)
        self.add_pointwise("hard-swish", kind="hard-swish")

    def add_branch(self) -> None:
        """Add the sum of the current tensor and a branch of equal shape and, in the backward pass, of their gradients.

        If a norm is fused with the sum, the fused kernel also reads the branch and writes its gradient.
        """
        ops = layers.pointwise("add", self._vector_numerics, self.elements, reads=2.0, backward=(2.0, 1.0))
        if self.follows_norm:
            along = layers.pointwise("add", self._vector_numerics, self.elements, writes=0.0, backward=(2.0, 1.0))
            ops = layers.replace_when_fused("batchnorm", ops, [replace(op, launches=0.0) for op in along])
        self.ops += ops

    def add_concatenation(self, channels: int) -> None:
        """Add the concatenation of branches of equal size to a tensor of `channels` channels."""
        self.channels = channels
        self.add_pointwise("concatenate", backward=(1.0, 1.0))

    def add_branch_gradient_sums(self, branches: int) -> None:
        """Add the sum of the gradients from `branches` branches that read the current tensor."""
        if self.numerics.training:
            self.ops += layers.elementwise(
                "fork.gradient", self.numerics, self.elements, 2, 1, phase="backward", count=branches - 1.0
            )

    def add_pool(
        self,
        kernel: int | tuple[int, ...],
        stride: int | tuple[int, ...],
        *,
        padding: int | None = None,
        average: bool = False,
    ) -> None:
        """Add a maximum or average pooling.

        Its input is saved for the backward pass. A maximum pooling also saves an index of 8 bytes per output element.
        """
        before = self.elements
        self.keep_input()
        window = self._get_window_size(kernel)
        self.size = self.output_size(window, stride, padding)
        ratio = float(np.mean(self.elements / before)) if len(before) else 1.0
        if not average:
            self.keep_elements(self.elements * 8.0 / self.numerics.element)
        self.ops += layers.pool("pool", self.numerics, before, ratio)

    def add_global_mean(self) -> None:
        """Add the mean over all pixels of each channel."""
        self.add_pointwise("mean", writes=0.0, absorbed=False, backward=(0.0, 1.0))
        self.size = (1, 1, 1)

    def add_resize(self, share: float) -> None:
        """Add an interpolation to the current size, from an input with the fraction `share` of the pixels."""
        self.add_pointwise("resize", reads=share, backward=(1.0, share))

    def add_dense(self, out: int, *, bias: bool = True) -> None:
        """Add a dense layer that maps all channels and pixels of a sample to `out` values."""
        inputs = self.channels * prod(self.size)
        self.keep_elements(self.elements)
        self.raise_peak(self.batch * (inputs + out))
        self.ops += layers.linear("dense", self.numerics, self.batch, inputs, out, bias=bias)
        self.parameters += inputs * out + (out if bias else 0)
        self.channels, self.size = out, (1, 1, 1)

    def add_batched_matmul(self, rows: float, cols: float, depth: float) -> None:
        """Add one matrix product per sample, [rows, depth] times [depth, cols], and its two gradients."""
        shapes = (("", rows, cols, depth), ("", rows, depth, cols), ("", depth, cols, rows))
        self.ops += layers.matrix_products("product", self.numerics, self.batch, *shapes, selective=False)

    def add_dropout(self) -> None:
        """Add dropout, in training only. It saves a mask of one byte per element for the backward pass."""
        self.keep_elements(self.elements / self.numerics.element)
        self.add_training_pointwise("dropout", mask_bytes=1.0, backward=(1.0, 1.0), kind="dropout")

    def add_host_operator(self, name: str, forward: Floats, backward: Floats | float = 0.0) -> None:
        """Add small training kernels between which the host reads results, such as those that match boxes.

        `forward` and `backward` are the numbers of kernels in each pass of each shard, (S,).
        """
        if not self.numerics.training:
            return
        for phase, launches in zip(PHASES, (forward, backward), strict=True):
            if np.any(launches):
                label = name if phase == "forward" else f"{name}.gradient"
                self.ops += layers.elementwise(
                    label, self.numerics, self.batch, 1.0, 1.0, phase=phase, launches=launches, host_paced=True
                )

    def add_cross_entropy(self, classes: int | None = None) -> None:
        """Add softmax cross-entropy at every pixel, in training only. `classes` defaults to the number of channels."""
        if self.numerics.training:
            cols = float(classes or self.channels)
            self.ops += layers.cross_entropy("loss", self.numerics, self.elements / cols, np.full(1, cols))

    def add_up_conv(self, out: int) -> None:
        """Add a transposed convolution with kernel and stride 2, which doubles each side.

        It is priced as a 1 x 1 convolution to 4 times `out` channels (8 times for volumes), whose outputs are
        rearranged as pixels.
        """
        depth, height, width = self.size
        self.add_conv(out * (4 if self.flat else 8), 1)
        self.channels, self.size = out, (depth if self.flat else 2 * depth, 2 * height, 2 * width)
        self.add_bias("up-conv")

    def add_conv_norm_act(
        self,
        out: int,
        kernel: int | tuple[int, ...] = 3,
        stride: int | tuple[int, ...] = 1,
        *,
        groups: int = 1,
        padding: int | None = None,
        dilated: bool = False,
        activation: str = "relu",
    ) -> None:
        """Add a convolution, a norm and an activation. An activation "none" is left out."""
        self.add_conv(out, kernel, stride, groups=groups, padding=padding, dilated=dilated)
        self.add_channel_norm()
        self.add_activation(activation)

    def add_upsample(self) -> None:
        """Add nearest-neighbour interpolation to twice the height and width."""
        depth, height, width = self.size
        self.size = (depth, 2 * height, 2 * width)
        self.add_resize(0.25)

    def add_separable_conv(self, out: int) -> None:
        """Add a separable convolution: a 3 x 3 depthwise convolution and a 1 x 1 convolution with a bias."""
        self.add_conv(self.channels, 3, groups=self.channels)
        self.add_conv(out, 1, bias=True)

    def add_squeeze_excite(self, hidden: int, activation: str = "relu") -> None:
        """Add squeeze-and-excitation: a global mean, two small dense layers with biases, and a scale per channel."""
        self.add_pointwise("squeeze", writes=0.0, absorbed=False)
        self.ops += layers.linear("squeeze.down", self.numerics, self.batch, self.channels, hidden)
        self.add_pointwise(activation, self.batch * hidden)
        self.ops += layers.linear("squeeze.up", self.numerics, self.batch, hidden, self.channels)
        self.add_pointwise("sigmoid", self.batch * self.channels)
        self.add_pointwise("excite", absorbed=False, backward=(3.0, 1.0))
        self.parameters += 2 * self.channels * hidden + hidden + self.channels
        self.keep_elements(self.elements)

    def add_classifier_head(self, classes: int, *, dropout: bool = False) -> None:
        """Add a classifier: a global mean, optional dropout, a dense layer and the loss."""
        self.add_global_mean()
        if dropout:
            self.add_dropout()
        self.add_dense(classes)
        self.add_cross_entropy()


@dataclass(frozen=True, slots=True)
class Architecture(Generic[DimensionsT]):
    """A family of networks: the class of its dimensions, and the function that adds its operators to a builder."""

    dimensions: type[DimensionsT]
    build: Callable[[NetworkBuilder, DimensionsT], None]
    reads_images: bool = True
    """Whether samples are decoded from pictures, rather than sound, words, series or latents."""
    latents: bool = False
    """Whether samples are latents of one size, made in advance."""
