"""Records of GPUs, links and GPU pools, in SI units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tilecast.learning.calibration import Calibration
from tilecast.learning.job_calibration import JobRuns
from tilecast.spec import Precision, SpecError

FP32_LIMITED: tuple[Precision, ...] = ("tf32", "fp16", "bf16")
"""Precisions in which the tensor cores of GeForce products are slower with FP32 accumulation."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Specifications of a GPU product or of a MIG slice. Rates are per second, without sparsity."""

    name: str
    product: str
    architecture: str
    compute_capability: float
    sm_count: int
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    l2_bytes: float
    l2_bandwidth_bytes_per_s: float
    boost_clock_hz: float
    tdp_w: float
    peak_flops: Mapping[str, float]
    """Dense peak in FLOP/s by precision, from the data sheet. Precisions that the GPU cannot run are missing."""
    sustained_ratio: Mapping[str, float]
    """Fraction of `peak_flops` that power and clock limits allow under sustained load, by precision.

    The key `attention` is for fused attention. It reaches less of the peak, and so the limit less soon.
    """
    intra_link: str
    """Name of the link that usually connects GPUs of this product inside a node."""
    fp16_accumulate_flops: float = 0.0
    """Peak of the tensor cores in FP16 with FP16 accumulation, in FLOP/s. It is 0 if FP32 accumulation is as fast."""
    bridge: str = ""
    """Name of the NVLink bridge that can connect some of the GPUs. It is empty if the product takes no bridges."""
    aliases: tuple[str, ...] = ()
    """Product strings in drivers, labels and tables, normalised by `normalise_product`."""
    sibling: str = ""
    """Name of the shipped GPU from which this GPU was derived or completed. It is empty for a shipped GPU."""
    mig: str = ""
    """MIG profile of a slice. It is empty for a whole GPU. Slices cannot communicate, so a job runs on one slice."""
    share: float = 1.0
    """Fraction of the whole GPU that a slice uses."""
    instances: int = 1
    """Number of slices of this profile that fit on a whole GPU."""

    def __hash__(self) -> int:
        return hash(self.name)

    def peak(self, precision: str) -> float:
        """Return the dense peak of the GPU in a precision, in FLOP/s.

        Raises:
            SpecError: the GPU has no such precision.
        """
        if precision not in self.peak_flops:
            have = ", ".join(self.peak_flops)
            raise SpecError("precision", f"{self.name} has no {precision} units", f"use one of {have}")
        return self.peak_flops[precision]

    def without_fp32_limit(self) -> Gpu:
        """Return a copy of the GPU whose tensor cores are as fast with FP32 accumulation as with FP16 accumulation."""
        # The caches and memory of the chip are built to feed its tensor cores at these rates.
        if not self.fp16_accumulate_flops:
            return self
        factor = self.fp16_accumulate_flops / self.peak("fp16")
        rates = {name: rate * (factor if name in FP32_LIMITED else 1.0) for name, rate in self.peak_flops.items()}
        return replace(self, peak_flops=rates)

    def supports(self, precision: str) -> bool:
        """Return whether the GPU can run a precision."""
        return precision in self.peak_flops


@dataclass(frozen=True, slots=True)
class MigProfile:
    """A MIG profile: the size of a slice into which a GPU can be cut."""

    name: str
    sms: int
    """Number of SMs of a slice."""
    memory_bytes: float
    """Memory of a slice in bytes."""
    compute_share: float
    """Fraction of the GPU's compute slices."""
    memory_share: float
    """Fraction of the GPU's memory slices, and so of its memory bandwidth and L2."""
    instances: int
    """Number of slices of this profile that fit on one GPU."""

    @property
    def share(self) -> float:
        """Fraction of the GPU that a slice takes. It is the larger one of `compute_share` and `memory_share`."""
        return max(self.compute_share, self.memory_share)

    def slice_gpu(self, gpu: Gpu) -> Gpu:
        """Return a slice of this profile as a `Gpu`.

        The slice has the clocks of the whole GPU. Its peak rates are proportional to its number of SMs. Its memory
        bandwidth and L2 are proportional to its number of memory slices.
        """
        sms = self.sms / gpu.sm_count
        return replace(
            gpu,
            name=f"{gpu.name}{MIG_INFIX}{self.name}",
            product=f"{gpu.product} MIG {self.name}",
            sm_count=self.sms,
            memory_bytes=self.memory_bytes,
            memory_bandwidth_bytes_per_s=gpu.memory_bandwidth_bytes_per_s * self.memory_share,
            l2_bytes=gpu.l2_bytes * self.memory_share,
            l2_bandwidth_bytes_per_s=gpu.l2_bandwidth_bytes_per_s * self.memory_share,
            tdp_w=gpu.tdp_w * self.share,
            peak_flops={name: rate * sms for name, rate in gpu.peak_flops.items()},
            fp16_accumulate_flops=gpu.fp16_accumulate_flops * sms,
            aliases=(),
            mig=self.name,
            share=self.share,
            instances=self.instances,
        )


MIG_INFIX = "-mig-"
"""Text between the GPU and the profile in the name of a slice, as in product strings of GPU Feature Discovery."""

PROTOCOLS = ("ll", "ll128", "simple")
"""NCCL's protocols. LL has a flag in every 8 bytes, LL128 has a flag in every 128 bytes, and Simple has no flags."""
MESSAGE = "message"
"""Name of a further protocol, for a message from one rank to another. A link without it uses `PROTOCOLS` instead."""


@dataclass(frozen=True, slots=True)
class LinkProtocol:
    """Latency and rate of an NCCL protocol on a link."""

    start_s: float
    """Seconds of a collective before its first hop."""
    hop_s: float
    """Seconds of one hop."""
    share: float
    """Rate of the protocol as a fraction of `bandwidth_bytes_per_s * efficiency` of the link."""


@dataclass(frozen=True, slots=True)
class NetworkTier:
    """A tier of network switches."""

    nodes: int
    """Number of nodes below one switch."""
    oversubscription: float
    """Total bandwidth of the nodes below a switch, divided by the bandwidth of the uplinks of the switch."""


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between the GPUs of a node, or between nodes, with the constants of collectives on it."""

    name: str
    kind: str
    bandwidth_bytes_per_s: float
    """Bandwidth in one direction: of one GPU for a link inside a node, or of all network interfaces of a node."""
    efficiency: float
    """Fraction of the bandwidth that large transfers reach."""
    protocols: Mapping[str, LinkProtocol]
    """Protocols that NCCL uses on the link, by the names in `PROTOCOLS` and `MESSAGE`."""
    peer_s: float
    """Seconds for each rank with which a rank exchanges messages."""
    own_share: float = 0.0
    """Time to copy a rank's own 1/n of the buffer, relative to the time to send as many bytes over the link."""
    per_node: bool = False
    """Whether the link is between nodes."""
    nics: int = 1
    """Network interfaces of one node."""
    gpu_nics: int = 1
    """Network interfaces that one GPU can use."""
    switched: bool = True
    """Whether all pairs of GPUs have the full bandwidth at once (NVSwitch). Otherwise they share a bus (PCIe)."""
    wired: tuple[tuple[float, float], ...] = ()
    """Fraction of the bandwidth that a number of GPUs has among themselves, as pairs (number, fraction), ascending.

    It is for GPUs that are connected without a switch. Fractions for other numbers are interpolated.
    """
    domain: int = 0
    """Number of GPUs that the link connects. 0 means the GPUs of a node.

    It is smaller for NVLink bridges and larger for NVLink domains of a rack. For a bus between NVLink bridges, it is
    the number of GPUs of a bridge.
    """
    beyond: Link | None = None
    """Link between the domains of this link. None if there is no such link."""
    reduction_bytes_per_s: float = 0.0
    """Rate per GPU of an all-reduce in the switch (NVLS). 0 if the switch cannot reduce."""
    reduction_start_s: float = 0.0
    """Seconds of an all-reduce in the switch before its first byte."""
    tiers: tuple[NetworkTier, ...] = ()
    """Tiers of switches that are oversubscribed."""
    spread: float = 0.0
    """Half-width of the 90 % interval of a time on the link, as a logarithm."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of equal nodes that a job may use, with the hardware, prices and corrections that forecasts depend on."""

    name: str
    gpu: Gpu
    gpus_per_node: int
    max_nodes: int
    intra: Link
    inter: Link
    node_type: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, str], ...] = ()
    price_per_gpu_hour: float | None = None
    currency: str = "USD"
    layers: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Source of each field, such as override, instance type or default, by field. Equality ignores it."""
    free_gpus: int | None = None
    """Number of GPUs that no pod uses now. None if it is unknown. It does not affect the ranking of pools."""
    calibration: Calibration = field(default_factory=Calibration)
    """Corrections of forecasts on this pool, learned from runs in the cluster."""
    own: JobRuns = field(default_factory=JobRuns)
    """Earlier runs of the job, on any pool, that correct its forecasts."""
    usual_gpus_per_node: int = 0
    """GPUs of a whole node if the pool is only a fraction of a node, otherwise 0."""
    spare_gpus: int = 0
    """GPUs of one more node that is smaller than the others. 0 if all nodes are equal."""

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def is_partial_node(self) -> bool:
        """Whether the pool is only a fraction of one node."""
        return self.max_nodes == 1 and not self.spare_gpus and self.usual_gpus_per_node > self.gpus_per_node

    @property
    def max_gpus(self) -> int:
        """Number of GPUs of the whole pool."""
        return self.gpus_per_node * self.max_nodes + self.spare_gpus

    @property
    def domain(self) -> int:
        """Number of GPUs that the link inside nodes connects. An NVLink domain of a rack spans several nodes."""
        wide = self.intra.domain if self.intra.switched and self.intra.beyond is None else 0
        return max(wide // self.gpus_per_node, 1) * self.gpus_per_node
