"""Convolutional networks as graphs: ResNet, ResNeXt, SE-ResNeXt, VGG and U-Net, from a few numbers each.

A network is written once as a walk that carries (channels, height, width) and appends convolutions,
normalisations and poolings; the numbers that tell ResNet-18 from ResNeXt-101 stand in the presets.

Sources: He et al., arXiv 1512.03385 (table 1; the stride of a bottleneck sits in its 3x3 convolution, as
torchvision and the MLPerf "v1.5" have it); Xie et al., arXiv 1611.05431; Hu et al., arXiv 1709.01507;
Simonyan and Zisserman, arXiv 1409.1556; Ronneberger et al., arXiv 1505.04597.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tilecast.graph import Block, Graph, KernelTable, Op, Phase, Shards
from tilecast.models import layers
from tilecast.models.layers import Numerics
from tilecast.spec import Floats, Workload


@dataclass(slots=True)
class _Walk:
    """A network under construction. The shape of the tensor in hand is (batch, channels, *size)."""

    numerics: Numerics
    batch: Floats
    channels: int
    size: tuple[int, int, int]
    ops: list[Op] = field(default_factory=list)
    parameters: float = 0.0
    kept: Floats = field(default_factory=lambda: np.zeros(1))
    first: bool = True

    def conv(
        self, out: int, kernel: int, stride: int = 1, *, groups: int = 1, bias: bool = False, padded: bool = True
    ) -> None:
        """A convolution with `same` padding, forward and both gradients (none for the image itself)."""
        flat = self.size[0] == 1
        depth_kernel = 1 if flat else kernel
        reached = tuple(
            max(1, -(-extent // stride) if padded else (extent - kernel) // stride + 1) for extent in self.size
        )
        size = (1, *reached[1:]) if flat else reached
        dims: dict[str, Floats | float] = {
            "batch": self.batch, "c_in": self.channels, "c_out": out,
            "in_d": self.size[0], "in_h": self.size[1], "in_w": self.size[2],
            "k_d": depth_kernel, "k_h": kernel, "k_w": kernel,
            "out_d": size[0], "out_h": size[1], "out_w": size[2], "groups": groups,
        }  # fmt: skip
        name = f"conv{len(self.ops)}"

        def add(label: str, direction: float, phase: Phase) -> None:
            table = KernelTable.of("conv", self.numerics.matrix, **dims, direction=direction)
            self.ops.append(Op(f"{name}{label}", table, phase))

        self.keep(self.elements)
        add("", 0.0, "forward")
        if self.numerics.training:
            if not self.first:
                add(".input-gradient", 1.0, "backward")
            add(".weight-gradient", 2.0, "backward")
        self.parameters += out * self.channels / groups * kernel * kernel * depth_kernel + (out if bias else 0)
        self.channels, self.size, self.first = out, size, False  # type: ignore[assignment]

    @property
    def elements(self) -> Floats:
        return self.batch * self.channels * self.size[0] * self.size[1] * self.size[2]

    def keep(self, elements: Floats) -> None:
        self.kept = self.kept + elements * self.numerics.element

    def norm(self, *, relu: bool = True) -> None:
        """Batch norm in training: one pass for the statistics, one to normalise; backward likewise."""
        self.keep(self.elements)
        self.ops += layers.pointwise(
            "norm", self.numerics, self.elements, reads=2.0, absorbed=False, backward=(4.0, 1.0)
        )
        self.parameters += 2 * self.channels
        if relu:
            self.relu()

    def relu(self) -> None:
        if not self.numerics.fused:
            self.ops += layers.pointwise("relu", self.numerics, self.elements)

    def add(self) -> None:
        """Sum with a branch of the same shape."""
        self.ops += layers.pointwise("add", self.numerics, self.elements, reads=2.0, backward=(2.0, 1.0))

    def pool(self, stride: int) -> None:
        """Max pooling; the index of the maximum is kept."""
        before = self.elements
        flat = self.size[0] == 1
        depth, height, width = self.size
        self.size = (
            1 if flat else max(1, -(-depth // stride)),
            max(1, -(-height // stride)),
            max(1, -(-width // stride)),
        )
        ratio = float(np.mean(self.elements / before))
        self.keep(self.elements)
        self.ops += layers.elementwise("pool", self.numerics, before, 1.0, ratio)
        if self.numerics.training:
            self.ops += layers.elementwise("pool.gradient", self.numerics, before, 2 * ratio, 1.0, phase="backward")

    def excite(self, reduction: int) -> None:
        """Squeeze-and-excitation: a global mean, two small dense layers, and a scale."""
        hidden = max(1, self.channels // reduction)
        self.ops += layers.pointwise("squeeze", self.numerics, self.elements, writes=0.0, absorbed=False)
        self.ops += layers.linear("squeeze.down", self.numerics, self.batch, self.channels, hidden)
        self.ops += layers.linear("squeeze.up", self.numerics, self.batch, hidden, self.channels)
        self.ops += layers.pointwise("excite", self.numerics, self.elements, absorbed=False, backward=(3.0, 1.0))
        self.parameters += 2 * self.channels * hidden + hidden + self.channels
        self.keep(self.elements)

    def dense(self, inputs: int, outputs: int) -> None:
        self.ops += layers.linear("dense", self.numerics, self.batch, inputs, outputs, bias=True)
        self.parameters += inputs * outputs + outputs
        self.keep(self.batch * inputs)


def _resnet(walk: _Walk, extra: Mapping[str, float]) -> None:
    bottleneck, groups = bool(extra.get("bottleneck")), int(extra.get("groups", 1))
    base, small = int(extra.get("group_width", 64)), bool(extra.get("small_stem"))
    walk.conv(64, 3 if small else 7, 1 if small else 2)
    walk.norm()
    if not small:
        walk.pool(2)
    for stage in range(4):
        width = 64 * 2**stage
        inner = width * base * groups // 64 if bottleneck else width
        out = width * 4 if bottleneck else width
        for index in range(int(extra[f"stage{stage + 1}"])):
            stride = 2 if stage and not index else 1
            entry = (walk.channels, walk.size)
            if bottleneck:
                walk.conv(inner, 1)
                walk.norm()
                walk.conv(inner, 3, stride, groups=groups)
                walk.norm()
                walk.conv(out, 1)
            else:
                walk.conv(out, 3, stride)
                walk.norm()
                walk.conv(out, 3)
            walk.norm(relu=False)
            if extra.get("excite"):
                walk.excite(int(extra["excite"]))
            if index == 0 and (entry[0] != out or stride != 1):
                exit_ = (walk.channels, walk.size)
                walk.channels, walk.size = entry
                walk.conv(out, 1, stride)
                walk.norm(relu=False)
                walk.channels, walk.size = exit_
            walk.add()
            walk.relu()
    walk.dense(walk.channels, int(extra.get("classes", 1000)))


def _vgg(walk: _Walk, extra: Mapping[str, float]) -> None:
    for stage in range(5):
        for _ in range(int(extra[f"stage{stage + 1}"])):
            walk.conv(min(64 * 2**stage, 512), 3, bias=not extra.get("batch_norm"))
            if extra.get("batch_norm"):
                walk.norm()
            else:
                walk.relu()
        walk.pool(2)
    features = walk.channels * walk.size[1] * walk.size[2]
    for inputs, outputs in ((features, 4096), (4096, 4096), (4096, int(extra.get("classes", 1000)))):
        walk.dense(inputs, outputs)


def _unet(walk: _Walk, extra: Mapping[str, float]) -> None:
    base, depth, cap = int(extra["base"]), int(extra["depth"]), int(extra.get("max_channels", 512))
    channels = [min(base * 2**level, cap) for level in range(depth)]
    sizes = []
    for level, width in enumerate(channels):
        walk.conv(width, 3, 2 if level else 1)
        walk.norm()
        walk.conv(width, 3)
        walk.norm()
        sizes.append(walk.size)
    for level in range(depth - 2, -1, -1):
        walk.conv(channels[level] * 4 if walk.size[0] == 1 else channels[level] * 8, 1)
        walk.channels, walk.size = channels[level] * 2, sizes[level]
        walk.conv(channels[level], 3)
        walk.norm()
        walk.conv(channels[level], 3)
        walk.norm()
    walk.conv(int(extra.get("classes", 4)), 1, bias=True)


NETWORKS: Mapping[str, Callable[[_Walk, Mapping[str, float]], None]] = {
    "resnet": _resnet,
    "vgg": _vgg,
    "unet": _unet,
}
"""Families of convolutional networks; each walks the whole network."""


def build(workload: Workload, shards: Shards) -> Graph:
    """The graph of a convolutional network: one block, data parallel only."""
    model = workload.model
    image = int(model.extra["image"])
    size = (int(model.extra.get("image_depth", 1)), image, int(model.extra.get("image_width", image)))
    channels = int(model.extra.get("image_channels", 3))
    walk = _Walk(Numerics.of(workload), shards.micro_batch.astype(float), channels, size)
    NETWORKS[model.family](walk, model.extra)
    block = Block(
        "network",
        1,
        tuple(walk.ops),
        parameters=np.full(len(shards), walk.parameters),
        activation_bytes=np.stack([walk.kept] * 3),
    )
    return Graph(
        first=(),
        layers=(block,),
        last=(),
        boundary_bytes=np.zeros(len(shards)),
        shards=len(shards),
        host_bytes_per_sample=float(channels * size[0] * size[1] * size[2]),
    )
