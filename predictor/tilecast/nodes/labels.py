"""The table `labels.toml`: the meaning of labels and resources of nodes. It is validated when it is read."""

from __future__ import annotations

import re
from functools import cache

from pydantic import BaseModel, ConfigDict

from tilecast import shipped
from tilecast.hardware import normalise_product
from tilecast.nodes.quantities import parse_count

MEMORY_TOLERANCE = 0.1
"""Largest relative difference of memory sizes that mean one GPU. Sources differ by up to 7 %.

For L4 they have 22888 to 24576 MiB.
"""


class _TableModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProductAlias(_TableModel):
    """A product name in a label that the GPU files do not list, and the GPU that it means."""

    value: str
    gpu: str
    memory_gib: float | None = None


class LabelSource(_TableModel):
    """Keys of the labels with which one program, such as GPU Feature Discovery, describes the GPUs of a node."""

    name: str
    product: str
    source: str
    is_exact: bool = False
    """Whether the driver reads the product from the device, so that the label takes precedence over the instance type.
    """
    count: str = ""
    memory_mib: str = ""
    network_mbit_per_s: str = ""
    values: tuple[ProductAlias, ...] = ()

    def find_gpu_name(self, product: str, memory_mib: int | None) -> str | None:
        """Return the GPU name that a product label means, or the label's value if no alias matches it.

        Return None if the memory contradicts all aliases, or if it is unknown and the aliases name several GPUs.

        Args:
            product: value of the product label.
            memory_mib: GPU memory from the memory label. None if absent.
        """
        rows = [row for row in self.values if normalise_product(row.value) == normalise_product(product)]
        if not rows:
            return product
        for row in rows:
            if row.memory_gib is None:
                return row.gpu
            expected = row.memory_gib * 1024
            if memory_mib and abs(memory_mib - expected) <= MEMORY_TOLERANCE * expected:
                return row.gpu
        return rows[0].gpu if len({row.gpu for row in rows}) == 1 and not memory_mib else None


class PartitionRule(_TableModel):
    """A label whose value can show that a node's GPUs are cut by MIG, shared or virtual.

    A value shows this if it contains the text `contains`, is one of `equals`, is a number greater than `above`, or
    matches the regular expression `pattern`.
    """

    code: str
    label: str
    message: str
    remedy: str
    source: str = ""
    contains: str | None = None
    equals: tuple[str, ...] = ()
    above: int | None = None
    pattern: str | None = None

    def matches(self, text: str | None) -> bool:
        """Return whether a label's value shows that GPUs are cut, shared or virtual.

        `text` is None if the label is absent.
        """
        if text is None:
            return False
        number = parse_count(text)
        return (
            text in self.equals
            or (self.contains is not None and self.contains in text)
            or (self.above is not None and number is not None and number > self.above)
            or (self.pattern is not None and re.search(self.pattern, text, re.ASCII | re.IGNORECASE) is not None)
        )


class LabelValue(_TableModel):
    """A label with one of its values."""

    label: str
    value: str


class TransientTaints(_TableModel):
    """Keys of taints that report a temporary state of a node, such as a missing network."""

    prefixes: tuple[str, ...]
    keys: tuple[str, ...]

    def matches(self, key: str) -> bool:
        """Return whether a taint with this key reports a temporary state of a node."""
        return key in self.keys or key.startswith(self.prefixes)


class TopologyLabels(_TableModel):
    """Label keys such as zone or rack. Nodes with an equal value are close to each other in the network."""

    keys: tuple[str, ...]
    source: str


class LabelTable(_TableModel):
    """Content of `labels.toml`."""

    instance_type: tuple[str, ...]
    gpu_resource: str
    shared_resource_suffix: str
    mig_resource_prefix: str
    mig_profile_labels: tuple[str, ...]
    dra_driver: str
    dra_whole: str
    dra_slice: str
    dra_class: str
    dra_slice_class: str
    dra_single: frozenset[str]
    nvlink_domain: tuple[str, ...]
    other_gpu_resources: tuple[str, ...]
    present: tuple[LabelValue, ...]
    node_pool: tuple[str, ...]
    sources: tuple[LabelSource, ...]
    partitioned: tuple[PartitionRule, ...]
    spot: tuple[LabelValue, ...]
    transient_taints: TransientTaints
    topology: TopologyLabels

    def is_other_gpu(self, resource: str) -> bool:
        """Return whether an extended resource is an accelerator of a vendor other than NVIDIA."""
        return any(
            resource.startswith(row[:-1]) if row.endswith("*") else resource == row for row in self.other_gpu_resources
        )


@cache
def read_label_table() -> LabelTable:
    """Return the content of `labels.toml`."""
    return LabelTable.model_validate(shipped.read_table("tilecast.nodes", "labels.toml"))


def gpu_resource() -> str:
    """Return the name of the resource that a pod requests to get whole GPUs."""
    return read_label_table().gpu_resource


def gpu_driver() -> str:
    """Return the name of the Dynamic Resource Allocation driver that publishes NVIDIA GPUs."""
    return read_label_table().dra_driver


def gpu_device_classes() -> tuple[str, str]:
    """Return the names of NVIDIA's DeviceClass for whole GPUs and of its DeviceClass for MIG slices."""
    return read_label_table().dra_class, read_label_table().dra_slice_class


@cache
def node_kind_labels() -> frozenset[str]:
    """Return the keys of node labels that describe the kind of a GPU node: GPU, count, memory, instance type, spot."""
    table = read_label_table()
    keys = {key for source in table.sources for key in (source.product, source.count, source.memory_mib) if key}
    return frozenset(keys | set(table.instance_type) | {mark.label for mark in table.spot})
