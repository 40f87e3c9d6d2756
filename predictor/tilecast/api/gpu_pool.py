"""The GPUPool resource: specifications that override node labels, and pools whose nodes do not exist yet.

Users and discovery write GPUPools. Discovery labels its pools and stores a digest of each spec in an annotation. A user
takes over a pool by editing its spec: the digest no longer matches, and discovery leaves the pool alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field, ValidationError
from pydantic.alias_generators import to_camel

from tilecast import untrusted
from tilecast.api.base import (
    API_VERSION,
    GROUP,
    MAX_GPUS,
    ApiModel,
    StatusModel,
    Toleration,
    ValidationRule,
    check_envelope,
    list_field,
    list_map_keyed_by,
    optional_field,
    validate_model,
)
from tilecast.api.calibration import PoolCalibration, PoolError
from tilecast.api.fields import as_mapping, value_at_path
from tilecast.api.status import Condition
from tilecast.hardware import Gpu, GpuFile, Link, complete_gpu, find_gpu, find_link, list_links
from tilecast.hardware.instances import find_network
from tilecast.spec import SpecError

KIND = "GPUPool"
DISCOVERED = f"{GROUP}/discovered"
"""Label of the pools that discovery created. With any value but "true", the pool belongs to a user."""
DISCOVERY = f"{GROUP}/discovery"
"""Annotation with discovery's record of a pool, as JSON."""
NODE_TYPE_LABEL = "node.kubernetes.io/instance-type"
GPU_NAME: str = GpuFile.model_json_schema()["properties"]["name"]["pattern"]
"""Regular expression for the name of a GPU, for the API server and for GPU files."""


class Rates(ApiModel):
    """A positive number per precision. FP32 is required. Leave out precisions that the GPU cannot run."""

    fp32: float | None = optional_field("Plain FP32.", gt=0, le=1e6)
    tf32: float | None = optional_field("TF32 matrix units.", gt=0, le=1e6)
    fp16: float | None = optional_field("FP16 matrix units.", gt=0, le=1e6)
    bf16: float | None = optional_field("BF16 matrix units.", gt=0, le=1e6)
    fp8: float | None = optional_field("FP8 matrix units.", gt=0, le=1e6)
    mxfp8: float | None = optional_field("MXFP8 matrix units, with scales of blocks.", gt=0, le=1e6)
    nvfp4: float | None = optional_field("NVFP4 matrix units.", gt=0, le=1e6)

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            "has(self.fp32)",
            lambda m: m.fp32 is not None,
            "has no fp32, which every GPU can run",
            "add fp32 from the data sheet",
        ),
    )


class SustainedRatios(ApiModel):
    """Fractions of the peak rates that power and clocks allow under sustained load. If absent, 1."""

    fp32: float | None = optional_field("Plain FP32.", gt=0, le=1)
    tf32: float | None = optional_field("TF32 matrix units.", gt=0, le=1)
    fp16: float | None = optional_field("FP16 matrix units.", gt=0, le=1)
    bf16: float | None = optional_field("BF16 matrix units.", gt=0, le=1)
    fp8: float | None = optional_field("FP8 matrix units.", gt=0, le=1)
    mxfp8: float | None = optional_field("MXFP8 matrix units.", gt=0, le=1)
    nvfp4: float | None = optional_field("NVFP4 matrix units.", gt=0, le=1)
    attention: float | None = optional_field("Fused attention in FP16 and BF16; absent is as these.", gt=0, le=1)


class GpuFacts(ApiModel):
    """Data-sheet specifications of a GPU that Tilecast does not ship. Rates are dense (without sparsity)."""

    product: str = Field(min_length=1, max_length=128, description="Product name as the driver prints it.")
    architecture: str = Field(min_length=1, max_length=64, description="Architecture, for instance hopper.")
    compute_capability: float = Field(gt=0, le=100, description="CUDA compute capability, for instance 9.0.")
    sm_count: int = Field(ge=1, le=4096, description="Streaming multiprocessors.")
    memory_gib: float = Field(gt=0, le=65536, description="Memory in GiB.")
    memory_bandwidth_gb_per_s: float = Field(gt=0, le=1e6, description="Memory bandwidth in 10^9 bytes per second.")
    l2_mib: float = Field(gt=0, le=65536, alias="l2Mib", description="L2 cache in MiB.")
    l2_bandwidth_gb_per_s: float = Field(
        gt=0, le=1e6, alias="l2BandwidthGbPerS", description="L2 read bandwidth in 10^9 bytes per second."
    )
    boost_clock_mhz: float = Field(gt=0, le=1e5, description="Boost clock in MHz.")
    tdp_w: float = Field(gt=0, le=1e5, description="Thermal design power in watts.")
    intra_link: str = Field(
        min_length=1, max_length=63, description="Usual link between GPUs of a node, for instance nvlink4."
    )
    peak_tflops: Rates = Field(description="Peak in 10^12 floating-point operations per second, by precision.")
    fp16_accumulate_tflops: float | None = optional_field(
        "Peak in FP16 with FP16 accumulation, where it is above peakTflops.fp16, as on GeForce. Absent takes that of "
        "the shipped GPU with the same product or the same figures, if there is one.",
        gt=0,
        le=1e6,
    )
    sustained_ratio: SustainedRatios | None = optional_field(
        "Shares of the peaks under sustained load, where power limits them. Absent takes those of the shipped GPU with "
        "the same product or the same figures, if there is one."
    )


class GpuSource(ApiModel):
    """The pool's GPU: one that Tilecast knows by name or product, or its specifications under a new name."""

    name: str = Field(
        min_length=1, max_length=63, description="Name or product string of a known GPU, or a new name with facts."
    )
    facts: GpuFacts | None = optional_field("Data-sheet facts; they win over what Tilecast ships.")

    def gpu(self) -> Gpu:
        """Return the GPU that the fields name or specify.

        Raises:
            SpecError: the GPU's name is unknown and no specifications are given, or the specifications are invalid.
        """
        if self.facts is None:
            try:
                return find_gpu(self.name)
            except SpecError as error:
                raise SpecError("spec.gpu.name", error.problem, f"{error.remedy}; or give its facts") from None
        find_pool_link(self.facts.intra_link, "spec.gpu.facts.intraLink", per_node=False)
        facts = self.facts.model_dump(exclude_none=True)
        facts["architecture"] = self.facts.architecture.lower()
        try:
            return complete_gpu(GpuFile.model_validate({"name": self.name, "sources": {"facts": "GPUPool"}, **facts}))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(to_camel(str(part)) for part in first["loc"])
            field = f"spec.gpu.{where}" if where == "name" else f"spec.gpu.facts.{where}"
            raise SpecError(field, first["msg"], "correct it after the data sheet") from None

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            f"!has(self.facts) || self.name.matches('{GPU_NAME}')",
            lambda m: m.facts is None or re.fullmatch(GPU_NAME, m.name) is not None,
            "a new GPU's name has other characters than a-z, 0-9, dot and dash, or begins with a dot or dash",
            "write it in lower case with dashes between words",
        ),
    )


class PoolLinks(ApiModel):
    """Links by name, as in tilecast's `hardware/links`."""

    intra_node: str | None = optional_field(
        "Between GPUs of a node, for instance nvlink4 or pcie4.", min_length=1, max_length=63
    )
    inter_node: str | None = optional_field(
        "Between nodes, for instance infiniband-ndr-8x400 or ethernet-100.", min_length=1, max_length=63
    )
    nics_per_node: int | None = optional_field(
        "Network interfaces of one node; absent takes those of the link.", ge=1, le=64
    )
    nvlink_domain: int | None = optional_field(
        "GPUs that share NVLink across nodes, for instance 72 in a GB200 NVL72 rack; absent takes what the "
        "nodes' cliques or the link say.",
        ge=2,
        le=1024,
    )


class Price(ApiModel):
    """Price of one GPU. It replaces every price that Tilecast ships."""

    per_gpu_hour: float = Field(ge=0, le=1e6, description="Price of one GPU, or of one slice, for one hour.")
    spot: float | None = optional_field(
        "Price of one GPU for one hour on nodes that are labelled as spot.", ge=0, le=1e6
    )
    currency: str = Field(default="USD", pattern="^[A-Z]{3}$", max_length=3, description="ISO 4217 code.")

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            "!has(self.spot) || self.spot <= self.perGpuHour",
            lambda m: m.spot is None or m.spot <= m.per_gpu_hour,
            "spot is above perGpuHour",
            "correct one of them",
        ),
    )


class GPUPoolSpec(ApiModel):
    """The nodes of the pool, existing or planned, and their specifications."""

    selector: dict[str, str] = Field(
        default_factory=dict, max_length=16, description="Labels of the pool's nodes; empty means those of nodeType."
    )
    gpu: GpuSource | None = optional_field("The GPU; absent takes what the nodes or nodeType say.")
    mig: str | None = optional_field(
        "MIG profile of the GPU's slices, which are then the pool's devices, for instance 1g.10gb; absent "
        "takes what the nodes say.",
        max_length=16,
        pattern=r"^[1-9]g\.[0-9]+gb$",
    )
    gpus_per_node: int | None = optional_field("GPUs of one node; absent takes what nodes say.", ge=1, le=128)
    node_type: str | None = optional_field(
        "Instance type; with maxNodes it prices a pool that has no node right now.", min_length=1, max_length=63
    )
    max_nodes: int | None = optional_field(
        "Most nodes the pool can have; absent takes the nodes it has.", ge=0, le=MAX_GPUS
    )
    links: PoolLinks | None = optional_field("Links; absent takes those of the instance type or the GPU.")
    price: Price | None = optional_field("Price; absent takes the instance type's list price, if known.")
    tolerations: list[Toleration] | None = optional_field(
        "What jobs must tolerate; absent takes the taints of the nodes.", max_length=16
    )

    spot: bool | None = optional_field("Whether the nodes are sold as spot; absent takes what their labels say.")
    kueue_flavor: str | None = optional_field(
        "Kueue ResourceFlavor of the nodes; absent takes the one whose nodeLabels they carry.",
        min_length=1,
        max_length=253,
    )
    observation_query: str | None = optional_field(
        "PromQL that gives the step of a job on this pool in seconds; $namespace and $name stand for it.",
        min_length=1,
        max_length=1024,
    )
    topology_keys: list[str] = list_field(
        "Node labels that say which nodes are near each other, nearest first; empty takes the known ones.",
        max_length=16,
    )

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            "has(self.selector) && size(self.selector) > 0 || has(self.nodeType) || has(self.gpu)",
            lambda m: bool(m.selector) or m.node_type is not None or m.gpu is not None,
            "says neither which nodes nor which GPU",
            "give selector, nodeType or gpu, for instance gpu: {name: a100-80}",
        ),
    )


class PoolGpus(StatusModel):
    """GPUs of the pool's nodes."""

    total: int = Field(ge=0, description="Physical GPUs.")
    allocatable: int = Field(ge=0, description="GPUs that pods may use.")
    free: int | None = optional_field("GPUs that nobody uses now; absent where neither Kueue nor pods are read.", ge=0)


class Fact(StatusModel):
    """A value and where it came from."""

    value: str = Field(max_length=253, description="The value.")
    layer: str = Field(
        max_length=64, description="Where it came from: override, a label's owner, instance type or default."
    )


class TopologyLevel(StatusModel):
    """How one topology label groups the pool's nodes."""

    key: str = Field(max_length=317, description="The node label.")
    domains: int = Field(ge=1, description="Distinct values of the label.")
    largest: int = Field(ge=1, description="Nodes that share one value, at most.")


class PoolSummary(StatusModel):
    """Flat strings for `kubectl get`."""

    gpu: str | None = optional_field("GPU of the pool.", max_length=63)
    shape: str | None = optional_field("Nodes x GPUs per node.", max_length=32)
    price: str | None = optional_field("Price of one GPU for one hour.", max_length=32)
    free: str | None = optional_field("Free GPUs of all, where known.", max_length=32)
    link: str | None = optional_field("Link between nodes.", max_length=63)
    origin: str | None = optional_field("Discovered, or User.", max_length=16)
    reason: str | None = optional_field("Reason of the Ready condition.", max_length=64)


class GPUPoolStatus(StatusModel):
    """The pool as the operator found it. Written by the operator only."""

    observed_generation: int | None = optional_field("Generation of the spec that was read.", ge=0)
    nodes: int | None = optional_field("Nodes of the pool now.", ge=0)
    gpus: PoolGpus | None = optional_field("GPUs of those nodes.")
    facts: dict[str, Fact] = Field(
        default_factory=dict,
        max_length=16,
        description="gpu, gpusPerNode, intraNode, interNode, nvlinkDomain, price and their layers.",
    )
    kueue_flavor: str | None = optional_field("Kueue ResourceFlavor whose usage says what is free.", max_length=253)
    topology: list[TopologyLevel] = list_field("Topology labels that the nodes carry, nearest first.", max_length=16)
    conditions: list[Condition] = list_field(
        "Ready: whether jobs can be advised onto the pool. ScaledDown: whether fewer nodes exist than it "
        "can have. CapacityKnown: whether something says what is free. Drifted, of a pool that has had runs: whether "
        "its newest runs contradict older ones.",
        max_length=8,
        **list_map_keyed_by("type"),
    )
    calibration: PoolCalibration | None = optional_field(
        "What measured steps of the pool's jobs teach about forecasts."
    )
    error: PoolError | None = optional_field("How far forecasts for the pool's jobs lie off.")
    summary: PoolSummary | None = optional_field("Flat strings for kubectl get.")


def parse_gpu_pool(document: Mapping[str, Any]) -> tuple[str, GPUPoolSpec]:
    """Return the name and the checked spec of a GPUPool document.

    Raises:
        SpecError: a field is invalid. The error has the path of the first invalid field.
    """
    name, spec = check_envelope(document, KIND)
    return name, validate_model(GPUPoolSpec, spec, "spec")


@dataclass(frozen=True, slots=True)
class Discovery:
    """Record that node discovery stores in a GPUPool that it created."""

    identity: str
    """GPU, node shape, link and market, which together distinguish the pool from others."""
    layer: str
    """Source of its GPU facts, such as a label's owner or the instance type."""


def read_discovery(document: Mapping[str, Any], spec: GPUPoolSpec) -> Discovery | None:
    """Return the record that discovery stored in a GPUPool, or None if the GPUPool belongs to a user.

    A GPUPool belongs to the user who created it, who edited its spec, or who removed its discovery label.
    """
    labels, annotations = (
        as_mapping(value_at_path(document, ("metadata", part))) for part in ("labels", "annotations")
    )
    try:
        note = untrusted.parse_json(annotations[DISCOVERY]) if labels.get(DISCOVERED) == "true" else {}
        value = Discovery(str(note["identity"]), str(note["layer"]))
        return value if note["spec"] == _digest_spec(spec) else None
    except (KeyError, TypeError, ValueError):
        return None


def build_discovered_pool(name: str, spec: GPUPoolSpec, note: Discovery) -> dict[str, Any]:
    """Return the GPUPool object that node discovery writes for a pool, with `note` in its annotations."""
    fields = {"identity": note.identity, "layer": note.layer, "spec": _digest_spec(spec)}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": name,
            "labels": {DISCOVERED: "true"},
            "annotations": {DISCOVERY: json.dumps(fields, separators=(",", ":"))},
        },
        "spec": _dump_spec(spec),
    }


def _dump_spec(spec: GPUPoolSpec) -> dict[str, Any]:
    """Return a spec as a dictionary, without absent fields and default values."""
    fields: dict[str, Any] = spec.model_dump(by_alias=True, exclude_defaults=True, exclude_none=True)
    return fields


def _digest_spec(spec: GPUPoolSpec) -> str:
    return hashlib.sha256(json.dumps(_dump_spec(spec), sort_keys=True).encode()).hexdigest()[:16]


def find_pool_link(name: str, field: str, *, per_node: bool) -> Link:
    """Return the link called `name` from the catalogue.

    Args:
        name: name of the link as the user wrote it.
        field: name of the field in errors.
        per_node: True for a link between nodes, False for a link between GPUs of a node.

    Raises:
        SpecError: there is no such link, or it is of the other type, within nodes or between them.
    """
    try:
        link = find_network(name) if per_node else find_link(name)
    except SpecError as error:
        raise SpecError(field, error.problem, error.remedy) from None
    if link.per_node != per_node:
        problem = f"{name} joins {'nodes' if link.per_node else 'GPUs of a node'}"
        suitable = ", ".join(other.name for other in list_links().values() if other.per_node == per_node)
        raise SpecError(field, problem, f"use one of {suitable}")
    return link
