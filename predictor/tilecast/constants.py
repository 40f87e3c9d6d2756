"""Constants from `constants.toml`, in SI units: fitted numbers, and properties of libraries and architectures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from tilecast.hardware import Gpu
from tilecast.shipped import NumbersFile, drop_sources, read_table

_NAME = "constants.toml"
_HOSTS = ("eager", "compiled", "cudaGraphs", "xla", "graph")
_ATTENTION = ("title", "least_compute_capability", "most_compute_capability", "reads_fp32", "times")
_WIDTHS = ("communication", "host", "slow_host", "kernels", "plans")
_FAMILIES = ("decoder", "encoder", "encdec", "moe", "vit", "traced", "other")
_SECTIONS = (
    "launch_us", "collective_us", "step_ms", "gradient_us", "overlap", "expert_dispatch", "alignment", "power", "fp8",
    "implicit", "scale", "factor", "memory", "vector", "attention", "optimizer", "range", "unmeasured", "unstated",
    "tiles", "split_k", "kernels", "nccl", "channels", "device_memory", "resident_threads", "host", "host_link",
    "host_step", "contention", "sharing",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """A library of fused attention, as `constants.toml` describes it."""

    name: str
    title: str
    least_compute_capability: float
    most_compute_capability: float
    reads_fp32: bool
    """Whether it has kernels for FP32 tensors."""
    times: Mapping[str, Mapping[str, float]]

    def runs_on(self, gpu: Gpu, *, is_mixed: bool) -> bool:
        """Return whether the library has kernels for a GPU and a job.

        A job in pure FP32 (`is_mixed` is False) also needs kernels that read FP32.
        """
        is_built = self.least_compute_capability <= gpu.compute_capability <= self.most_compute_capability
        return is_built and (is_mixed or self.reads_fp32)

    def time_factor(self, gpu: Gpu, phase: str) -> float:
        """Return the ratio of the library's kernel time on a GPU to the time that the utilization model predicts."""
        major = str(int(gpu.compute_capability))
        return self.times.get("any", {}).get(phase, 1.0) * self.times.get(major, {}).get(phase, 1.0)


@dataclass(frozen=True, slots=True)
class TileTable:
    """Tile sizes that a library chooses from, and the fraction of peak that each tile's inner loop reaches."""

    candidates: tuple[tuple[int, int, float], ...]
    prologue_k: float


@dataclass(frozen=True, slots=True)
class SplitK:
    """Split of the sum over `k` in matrix products: the possible numbers of parts, and the cost of each further part.

    The cost is a fraction of the time of a tile.
    """

    splits: tuple[int, ...]
    cost: float


@dataclass(frozen=True, slots=True)
class KernelConstants:
    """Properties of GPUs and their libraries. `constants.toml` describes each field."""

    extrapolation_spread: float
    tensor_core_capability: float
    unmeasured_fp8_capability: float
    usual_tensor_rate: float
    word_elements: int
    unpadded_channels: int
    tuned_groups: int
    packed_channels: int
    direct_share: float
    volume_share: float
    winograd_reduction: float
    block_threads: float
    resident_blocks: float
    random_number_cycles: float
    cached_read_share: float
    sector_bytes: float


@dataclass(frozen=True, slots=True)
class NcclConstants:
    """Properties of NCCL. `constants.toml` describes each field."""

    tree_share: float
    pat_share: float
    buffer_bytes: int
    channel_buffers: int
    node_peers: int


@dataclass(frozen=True, slots=True)
class ChannelBuffers:
    """Bytes of the buffers for all channels that NCCL opens."""

    communicator_bytes: float
    """Buffers of one dimension of parallelism that communicates."""
    peer_bytes: float
    """Buffers per peer in the same node for an all-to-all. Peers on other nodes share the network's buffers."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Shares and bytes of a GPU's memory that the driver, a context and the allocator use."""

    usable_share: float
    thread_bytes: int
    fragmentation: float
    cached: float
    varied: float


@dataclass(frozen=True, slots=True)
class ResidentThreads:
    """Number of threads that a multiprocessor can hold: the usual one, and other ones by compute capability."""

    usual: int
    other: tuple[tuple[float, int], ...]

    def on_gpu(self, gpu: Gpu) -> int:
        """Return the threads that a multiprocessor of a GPU can hold."""
        return dict(self.other).get(gpu.compute_capability, self.usual)


@dataclass(frozen=True, slots=True)
class HostRates:
    """Rates at which a host copies and updates weights, per GPU."""

    copy_bytes_per_s: float
    update_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class HostLink:
    """Bytes per second of copies between a GPU and its host: the usual rate, and others by compute capability."""

    usual: float
    other: tuple[tuple[float, float], ...]

    def bytes_per_s(self, gpu: Gpu) -> float:
        """Return the bytes per second that a GPU copies to or from its host, in one direction."""
        return dict(self.other).get(gpu.compute_capability, self.usual)


@dataclass(frozen=True, slots=True)
class HostStepModel:
    """Parameters of a function that gives the host's time per step from the number of weight tensors."""

    usual_tensors: float
    fixed_share: float
    most: float
    operator_tensors: float


@dataclass(frozen=True, slots=True)
class Constants:
    """Content of `constants.toml` in SI units."""

    launch_s: Mapping[str, tuple[float, float]]
    collective_s: Mapping[str, float]
    step_s: Mapping[str, float]
    gradient_s: Mapping[str, float]
    """Host time per weight tensor while data-parallel ranks wait for its gradient."""
    send_share: float
    slowdown: float
    tensor_share: float
    pipelined_share: float
    expert_share: float
    dispatch_share: float
    """Share of the multiprocessors that an exchange of tokens takes from computation beside it."""
    regular_odd_part: float
    """Largest odd factor at which a side of a matrix product still counts as regular."""
    irregular: float
    fp8_cublas: float
    """Factor on FP8 products that cuBLASLt runs, on a GPU whose FP8 products were measured."""
    unaligned: float
    """FLOP per cycle and multiprocessor of tensor-core products whose rows are not a whole number of words.

    The key is how many numbers are loaded at once.
    """
    joules_per_flop: Mapping[str, float]
    """Energy per FLOP on tensor cores during a step, by architecture."""
    implicit: float
    jitter: float
    """Relative spread of step times between ranks with samples of similar length. `uneven_jitter` is for other samples.
    """
    uneven_jitter: float
    attention: Mapping[str, FusedAttention]
    """Libraries of fused attention by name."""
    optimizer_efficiency: float
    memory: Mapping[str, float]
    """Factor on the seconds of memory-bound kernels, by host, on the GPU that `vector_flop_per_byte` describes."""
    vector_flop_per_byte: float
    """FP32 FLOP per byte of memory traffic of the GPU to which `memory` was fitted."""
    vector_exponent: float
    factor: Mapping[str, float]
    """Factor on the seconds of each part in `step.blocks.FACTORS`."""
    kernels: KernelConstants
    tiles: Mapping[str, TileTable]
    """Tiles by the units that run them."""
    split_k: SplitK
    nccl: NcclConstants
    channel_buffers: Mapping[str, ChannelBuffers]
    """NCCL's buffers by prefix of the GPU's link name. The first match counts, and the last entry is the default."""
    device_memory: DeviceMemory
    resident_threads: ResidentThreads
    host: HostRates
    host_link: HostLink
    host_step: HostStepModel
    contention: float
    """Ratio of link bandwidth to memory bandwidth on the GPU to which `slowdown` was fitted."""
    sharing: Mapping[str, float]
    """Widening of the 90 % range, as a logarithm, by the way in which jobs share a GPU."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Constants:
        """Return the constants in a table with the structure of the file.

        Raises:
            SpecError: a key is missing or unknown, or a number has no source. The message names file and key.
        """
        file = NumbersFile(_NAME, table)
        file.read_values("", _SECTIONS)
        numbers, record = file.read_numbers, file.read_record
        parts = ("matrix", "attention", "convolution", "exchange", "gradients")
        attention = file.read_values("attention")
        return cls(
            launch_s={mode: _read_launch_s(file, mode) for mode in file.read_values("launch_us", _HOSTS)},
            collective_s={mode: cost * 1e-6 for mode, cost in numbers("collective_us", _HOSTS).items()},
            step_s={mode: cost * 1e-3 for mode, cost in numbers("step_ms", _HOSTS).items()},
            gradient_s={mode: cost * 1e-6 for mode, cost in numbers("gradient_us", _HOSTS).items()},
            **numbers("overlap", ("slowdown", "send_share", "tensor_share", "pipelined_share", "expert_share")),
            dispatch_share=numbers("expert_dispatch", ("multiprocessors",))["multiprocessors"],
            **numbers("alignment", ("regular_odd_part", "irregular", "unaligned")),
            fp8_cublas=numbers("fp8", ("cublas",))["cublas"],
            joules_per_flop={name: energy * 1e-12 for name, energy in numbers("power", ("turing",)).items()},
            implicit=numbers("implicit", ("convolution",))["convolution"],
            **numbers("scale", ("jitter", "uneven_jitter")),
            attention={
                name: FusedAttention(name, **file.read_values(f"attention.{name}", _ATTENTION)) for name in attention
            },
            optimizer_efficiency=numbers("optimizer", ("efficiency",))["efficiency"],
            memory=numbers("memory", (*_HOSTS, "listed", "fused")),
            **{f"vector_{key}": value for key, value in numbers("vector", ("flop_per_byte", "exponent")).items()},
            factor=numbers("factor", parts),
            kernels=record(KernelConstants, "kernels"),
            tiles={
                units: record(TileTable, f"tiles.{units}") for units in file.read_values("tiles", ("simt", "tensor"))
            },
            split_k=record(SplitK, "split_k"),
            nccl=(nccl := record(NcclConstants, "nccl")),
            channel_buffers={link: _read_channel_buffers(file, link, nccl) for link in file.read_values("channels")},
            device_memory=record(DeviceMemory, "device_memory"),
            resident_threads=record(ResidentThreads, "resident_threads"),
            host=record(HostRates, "host"),
            host_link=record(HostLink, "host_link"),
            host_step=record(HostStepModel, "host_step"),
            contention=numbers("contention", ("link_share",))["link_share"],
            sharing=numbers("sharing", ("mig", "mps", "timeSlicing")),
        )

    def memory_factor(self, runner: str, gpu: Gpu) -> float:
        """Return the factor by which the seconds of memory-bound kernels on a GPU are multiplied.

        `runner` is a key of `memory`.
        """
        flop_per_byte = gpu.peak("fp32") / gpu.memory_bandwidth_bytes_per_s
        return float(self.memory[runner] * (self.vector_flop_per_byte / flop_per_byte) ** self.vector_exponent)


@dataclass(frozen=True, slots=True)
class RangeHalfWidths:
    """Half-widths of 90 % ranges, as logarithms."""

    communication: float
    host: float
    slow_host: float
    """Logarithm of the factor by which a slow host is slower than the forecast assumes."""
    kernels: float
    plans: float
    unmeasured: Mapping[str, float]
    """Width for each precision whose products were not measured."""
    unstated: Mapping[str, float]

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> RangeHalfWidths:
        """Return the widths in a table with the structure of the file.

        Raises:
            SpecError: a key is missing or unknown, or a number has no source. The message names file and key.
        """
        file = NumbersFile(_NAME, table)
        return cls(
            **file.read_numbers("range", _WIDTHS),
            unmeasured=file.read_numbers("unmeasured", ("mxfp8", "nvfp4")),
            unstated=file.read_numbers("unstated", _FAMILIES),
        )


@cache
def shipped_constants() -> Constants:
    """Return the constants that ship with Tilecast."""
    return Constants.from_table(_read_constants())


@cache
def shipped_widths() -> RangeHalfWidths:
    """Return the widths of ranges that ship with Tilecast."""
    return RangeHalfWidths.from_table(_read_constants())


@cache
def digest_constants() -> str:
    """Return the SHA-256 of the values of all constants, without comments and sources."""
    return hashlib.sha256(json.dumps(drop_sources(_read_constants()), sort_keys=True).encode()).hexdigest()


def _read_launch_s(file: NumbersFile, mode: str) -> tuple[float, float]:
    cost = file.read_numbers(f"launch_us.{mode}", ("forward", "backward"))
    return cost["forward"] * 1e-6, cost["backward"] * 1e-6


def _read_channel_buffers(file: NumbersFile, link: str, nccl: NcclConstants) -> ChannelBuffers:
    opened = file.read_numbers(f"channels.{link}", ("collective", "peer"))
    return ChannelBuffers(
        float(opened["collective"] * nccl.channel_buffers * nccl.buffer_bytes),
        float(opened["peer"] * nccl.buffer_bytes),
    )


@cache
def _read_constants() -> dict[str, Any]:
    return read_table("tilecast", _NAME)
