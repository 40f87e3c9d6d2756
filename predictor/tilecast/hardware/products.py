"""GPUs, links and pools as values in SI units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tilecast.calibration import Calibration
from tilecast.spec import Precision, SpecError
from tilecast.transfer import JobRuns

LIMITED: tuple[Precision, ...] = ("tf32", "fp16", "bf16")
"""Precisions whose tensor cores GeForce products hold back where they accumulate in FP32."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model. Rates are dense, per second, and those of the data sheet unless named sustained."""

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
    """FLOP/s by precision; a precision that the GPU cannot run is absent."""
    sustained_ratio: Mapping[str, float]
    """Share of `peak_flops` that power or clock limits leave under sustained load; 1 where not stated. `attention`, if
    stated, is that of fused attention, which reaches less of the peak and so meets the limit later."""
    intra_link: str
    """Name of the link between GPUs of one node that this product usually has."""
    fp16_accumulate_flops: float = 0.0
    """Peak of its tensor cores in FP16 that accumulate in FP16 too, where FP32 accumulation is held back to less; 0
    where both are alike."""
    bridge: str = ""
    """Name of the link that NVLink bridges make between some of them; empty where the product takes none."""
    aliases: tuple[str, ...] = ()
    """Product strings as drivers, labels and tables write them, normalised by `normalise`."""
    mig: str = ""
    """The MIG profile of a slice; empty for a whole GPU. A job runs on one slice: slices do not reach each other."""
    share: float = 1.0
    """Of the whole GPU, what a slice takes."""
    instances: int = 1
    """How many such slices fit on the whole GPU."""

    def peak(self, precision: str) -> float:
        """Dense peak in FLOP/s.

        Raises:
            SpecError: the GPU has no such precision.
        """
        if precision not in self.peak_flops:
            have = ", ".join(self.peak_flops)
            raise SpecError("precision", f"{self.name} has no {precision} units", f"use one of {have}")
        return self.peak_flops[precision]

    def unlimited(self) -> Gpu:
        """The GPU without the limit on FP32 accumulation: what its tensor cores are fed for."""
        if not self.fp16_accumulate_flops:
            return self
        factor = self.fp16_accumulate_flops / self.peak("fp16")
        rates = {name: rate * (factor if name in LIMITED else 1.0) for name, rate in self.peak_flops.items()}
        return replace(self, peak_flops=rates)

    def supports(self, precision: str) -> bool:
        return precision in self.peak_flops


@dataclass(frozen=True, slots=True)
class MigProfile:
    """A slice that a GPU can be cut into (Multi-Instance GPU)."""

    name: str
    sms: int
    memory_bytes: float
    compute_share: float
    """Of the GPU's compute slices."""
    memory_share: float
    """Of its memory slices, and so of bandwidth and L2."""
    instances: int
    """How many fit on one GPU."""

    @property
    def share(self) -> float:
        """Of the GPU, what nobody else can use: the larger of both shares."""
        return max(self.compute_share, self.memory_share)

    def slice(self, gpu: Gpu) -> Gpu:
        """The slice as a GPU of its own. Clocks are those of the whole; rates follow the multiprocessors and the memory
        slices."""
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
"""Between the GPU and the profile in a slice's name, as in the product strings of GPU Feature Discovery."""

PROTOCOLS = ("ll", "ll128", "simple")
"""NCCL's ways to move bytes: with a flag in every 8 bytes, in every 128 bytes, or in plain chunks."""
MESSAGE = "message"
"""How a message from one rank to another moves besides; where a link does not state it, it is as a collective."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """What a protocol costs on a link: once, for each hop, and its share of the rate that bulk data reach."""

    start_s: float
    hop_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier of a network: so many nodes share a switch whose uplinks carry 1/oversubscription of their rate."""

    nodes: int
    oversubscription: float


@dataclass(frozen=True, slots=True)
class Link:
    """A way between GPUs. Inside a node the bandwidth is one direction of one GPU; between nodes
    (`per_node`) it is one direction of all network interfaces of one node together."""

    name: str
    kind: str
    bandwidth_bytes_per_s: float
    efficiency: float
    """Share of the bandwidth that bulk data reach."""
    protocols: Mapping[str, Protocol]
    """By name, those of `PROTOCOLS` and `MESSAGE` that NCCL uses on the link."""
    peer_s: float
    """Cost of each further peer that a rank exchanges messages with."""
    own_share: float = 0.0
    """Cost of the part that stays on the rank (1/n of the buffer) against as many bytes on the link."""
    per_node: bool = False
    nics: int = 1
    """Network interfaces of one node."""
    gpu_nics: int = 1
    """How many of them one GPU can drive."""
    switched: bool = True
    """Whether all pairs have the full bandwidth at once (NVSwitch), or share a bus (PCIe)."""
    wired: tuple[tuple[float, float], ...] = ()
    """Where GPUs are wired to each other without a switch: how many of them, and the share of the bandwidth that so
    many have among themselves, in rising order. Between the points the share is interpolated."""
    domain: int = 0
    """GPUs that the link joins, where these are not just those of a node: fewer (NVLink bridges), or those of several
    nodes (NVLink domains of a rack); 0 means those of a node. Of a bus, the GPUs of each island that it joins."""
    beyond: Link | None = None
    """The link between such domains."""
    reduction_bytes_per_s: float = 0.0
    """Rate of each GPU at an all-reduce in the switch (NVLS); 0 where there is none."""
    reduction_start_s: float = 0.0
    tiers: tuple[Tier, ...] = ()
    spread: float = 0.0
    """Half-width of the 90 % range of a time on the link, as a logarithm."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Nodes of one kind that a job may use: what is priced."""

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
    """Where each fact came from: override, the vendor of a label, instance type, default. Pools of one kind are equal
    whoever told it."""
    free_gpus: int | None = None
    """GPUs that nothing uses now; None where that is not known. It decides no ranking."""
    calibration: Calibration = field(default_factory=Calibration)
    """What the cluster's own runs teach about forecasts on this pool."""
    own: JobRuns = field(default_factory=JobRuns)
    """What the job's own runs, here or elsewhere, teach about its forecasts."""
    usual_gpus_per_node: int = 0
    """GPUs of a whole node, where the pool was said to have a part of one; 0 where its nodes are what they are."""

    @property
    def is_part(self) -> bool:
        """Whether the pool is a part of one node."""
        return self.max_nodes == 1 and self.usual_gpus_per_node > self.gpus_per_node

    @property
    def max_gpus(self) -> int:
        return self.gpus_per_node * self.max_nodes

    @property
    def domain(self) -> int:
        """GPUs that the link inside nodes joins: those of a node, or of the whole nodes that share an NVLink domain."""
        wide = self.intra.domain if self.intra.switched and self.intra.beyond is None else 0
        return max(wide // self.gpus_per_node, 1) * self.gpus_per_node
