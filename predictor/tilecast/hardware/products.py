"""GPUs, links and pools as values in SI units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tilecast.learning.calibration import Calibration
from tilecast.learning.job_calibration import JobRuns
from tilecast.spec import Precision, SpecError

FP32_LIMITED: tuple[Precision, ...] = ("tf32", "fp16", "bf16")
"""Precisions in which tensor cores of GeForce products are slower if they accumulate in FP32."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU model. Rates are per second and without sparsity; they come from the data sheet unless named sustained."""

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
    """FLOP/s by precision; precisions that the GPU cannot run are absent."""
    sustained_ratio: Mapping[str, float]
    """Share of `peak_flops` that power or clock limits leave under sustained load, by precision; 1 if not stated. The
    key `attention` is for fused attention, which reaches less of the peak and so meets the limit later."""
    intra_link: str
    """Name of the link that usually joins GPUs of this product inside a node."""
    fp16_accumulate_flops: float = 0.0
    """Peak of the tensor cores in FP16 with FP16 accumulation; 0 if FP32 accumulation is as fast."""
    bridge: str = ""
    """Name of the link of NVLink bridges between some of the GPUs; empty if the product takes no bridges."""
    aliases: tuple[str, ...] = ()
    """Product strings in drivers, labels and tables, normalised by `normalise_product`."""
    sibling: str = ""
    """Name of the shipped GPU whose usual nodes and whose file describe this one; empty for a shipped GPU."""
    mig: str = ""
    """MIG profile of a slice; empty for a whole GPU. A job runs on one slice, since slices cannot reach each other."""
    share: float = 1.0
    """Share of the whole GPU that a slice takes."""
    instances: int = 1
    """Number of such slices that fit on the whole GPU."""

    def __hash__(self) -> int:
        return hash(self.name)

    def peak(self, precision: str) -> float:
        """Return the dense peak in FLOP/s.

        Raises:
            SpecError: the GPU has no such precision.
        """
        if precision not in self.peak_flops:
            have = ", ".join(self.peak_flops)
            raise SpecError("precision", f"{self.name} has no {precision} units", f"use one of {have}")
        return self.peak_flops[precision]

    def without_fp32_limit(self) -> Gpu:
        """Return the GPU with tensor-core rates that FP32 accumulation does not limit.

        The caches and memory of the chip are built to feed its tensor cores at these rates.
        """
        if not self.fp16_accumulate_flops:
            return self
        factor = self.fp16_accumulate_flops / self.peak("fp16")
        rates = {name: rate * (factor if name in FP32_LIMITED else 1.0) for name, rate in self.peak_flops.items()}
        return replace(self, peak_flops=rates)

    def supports(self, precision: str) -> bool:
        return precision in self.peak_flops


@dataclass(frozen=True, slots=True)
class MigProfile:
    """A profile of Multi-Instance GPU: one kind of slice that a GPU can be cut into."""

    name: str
    sms: int
    memory_bytes: float
    compute_share: float
    """Share of the GPU's compute slices."""
    memory_share: float
    """Share of the GPU's memory slices, and so of its bandwidth and L2."""
    instances: int
    """Number of such slices that fit on one GPU."""

    @property
    def share(self) -> float:
        """Fraction of the GPU that a slice occupies: the larger of its fractions of compute and of memory."""
        return max(self.compute_share, self.memory_share)

    def slice_gpu(self, gpu: Gpu) -> Gpu:
        """Return a `Gpu` that describes this slice of a whole GPU.

        Its clocks are those of the whole GPU. Its rates follow its number of multiprocessors and of memory slices.
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
"""Separator of GPU and profile in a slice's name, as in the product strings of GPU Feature Discovery."""

PROTOCOLS = ("ll", "ll128", "simple")
"""NCCL's protocols to move bytes: with a flag in every 8 bytes, with one in every 128 bytes, or in plain chunks."""
MESSAGE = "message"
"""Name of a further protocol for a message from rank to rank; if a link lacks it, messages move like collectives."""


@dataclass(frozen=True, slots=True)
class LinkProtocol:
    """Costs of a protocol on a link.

    Every message takes `start_s` seconds once and `hop_s` seconds for each hop. Its bytes then move at the fraction
    `share` of the link's rate for bulk data, which is bandwidth times `efficiency`.
    """

    start_s: float
    hop_s: float
    share: float


@dataclass(frozen=True, slots=True)
class NetworkTier:
    """Tier of a network.

    `nodes` nodes share a switch, whose uplinks carry 1/oversubscription of the nodes' total rate.
    """

    nodes: int
    oversubscription: float


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between GPUs, inside a node or between nodes (`per_node`).

    Inside a node the bandwidth is one direction of one GPU. Between nodes it is one direction of all network interfaces
    of one node together.
    """

    name: str
    kind: str
    bandwidth_bytes_per_s: float
    efficiency: float
    """Share of the bandwidth that bulk data reach."""
    protocols: Mapping[str, LinkProtocol]
    """Protocols that NCCL uses on the link, by the names in `PROTOCOLS` and `MESSAGE`."""
    peer_s: float
    """Cost of each further peer that a rank exchanges messages with."""
    own_share: float = 0.0
    """Cost of the part that stays on the rank (1/n of the buffer), relative to as many bytes on the link."""
    per_node: bool = False
    nics: int = 1
    """Network interfaces of one node."""
    gpu_nics: int = 1
    """Network interfaces that one GPU can drive."""
    switched: bool = True
    """Whether all pairs have the full bandwidth at once (NVSwitch), or share a bus (PCIe)."""
    wired: tuple[tuple[float, float], ...] = ()
    """Numbers of GPUs, ascending, with the share of the bandwidth that so many GPUs have among themselves. It is for
    GPUs that are wired to each other without a switch. Between the points the share is interpolated."""
    domain: int = 0
    """Number of GPUs that the link joins; 0 means the GPUs of a node. It is smaller for NVLink bridges, and larger for
    NVLink domains of a rack. For a bus, it is the number of GPUs of each island."""
    beyond: Link | None = None
    """Link between such domains; None if there is no other."""
    reduction_bytes_per_s: float = 0.0
    """Rate of each GPU in an all-reduce in the switch (NVLS); 0 if there is none."""
    reduction_start_s: float = 0.0
    tiers: tuple[NetworkTier, ...] = ()
    spread: float = 0.0
    """Half-width of the 90 % range of a time on the link, as a logarithm."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Nodes of one kind that a job may use, with everything that its predicted time and price depend on."""

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
    """Source of each fact: override, the maker of a label, instance type or default. It does not affect equality."""
    free_gpus: int | None = None
    """GPUs that nothing uses now; None if that is not known. It does not affect the ranking."""
    calibration: Calibration = field(default_factory=Calibration)
    """Corrections of forecasts on this pool, learned from the cluster's own runs."""
    own: JobRuns = field(default_factory=JobRuns)
    """The job's own runs, here or elsewhere, which correct its forecasts."""
    usual_gpus_per_node: int = 0
    """GPUs of a whole node, if the pool is declared as a part of a node; 0 if its nodes are whole."""

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def is_partial_node(self) -> bool:
        """Whether the pool is only a fraction of one node."""
        return self.max_nodes == 1 and self.usual_gpus_per_node > self.gpus_per_node

    @property
    def max_gpus(self) -> int:
        return self.gpus_per_node * self.max_nodes

    @property
    def domain(self) -> int:
        """Number of GPUs that the link inside nodes joins: those of a node, or of all whole nodes of a domain."""
        wide = self.intra.domain if self.intra.switched and self.intra.beyond is None else 0
        return max(wide // self.gpus_per_node, 1) * self.gpus_per_node
