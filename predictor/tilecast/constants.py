"""Fitted constants of a training step, from `constants.toml`, in SI units."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from tilecast.hardware import Gpu


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """An implementation of fused attention, as `constants.toml` describes it."""

    name: str
    least_compute_capability: float
    from_pytorch: bool
    times: Mapping[str, Mapping[str, float]]

    def runs(self, gpu: Gpu, *, native: bool) -> bool:
        """Return whether a framework runs it on this GPU, with its own kernels (`native`) or with PyTorch's."""
        return gpu.compute_capability >= self.least_compute_capability and (native or self.from_pytorch)

    def factor(self, gpu: Gpu, phase: str) -> float:
        """Return its time on this GPU over that of the kernel that the utilization model prices."""
        major = str(int(gpu.compute_capability))
        return self.times.get("any", {}).get(phase, 1.0) * self.times.get(major, {}).get(phase, 1.0)


@dataclass(frozen=True, slots=True)
class Constants:
    """Content of `constants.toml` in SI units."""

    launch_s: Mapping[str, tuple[float, float]]
    collective_s: Mapping[str, float]
    step_s: Mapping[str, float]
    gradient_s: Mapping[str, float]
    """Host time per tensor of weights whose gradient replicas wait for."""
    slowdown: float
    tensor_share: float
    pipelined_share: float
    expert_share: float
    irregular: float
    implicit: float
    jitter: float
    """Relative spread of step times between ranks whose samples are alike; `uneven_jitter` is that for other
    samples."""
    uneven_jitter: float
    attention: tuple[FusedAttention, ...]
    optimizer_efficiency: float
    memory: Mapping[str, float]
    """Factor on the seconds of kernels bound by memory on the GPU of `vector_flop_per_byte`, by host."""
    vector_flop_per_byte: float
    """FP32 FLOP per byte of memory traffic of the GPU that `memory` is for."""
    vector_exponent: float
    factor: Mapping[str, float]
    """Factor on the seconds of each of `step.blocks.FACTORS`."""

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Constants:
        return cls(
            {mode: (cost["forward"] * 1e-6, cost["backward"] * 1e-6) for mode, cost in table["launch_us"].items()},
            {mode: cost * 1e-6 for mode, cost in table["collective_us"].items()},
            {mode: cost * 1e-3 for mode, cost in table["step_ms"].items()},
            {mode: cost * 1e-6 for mode, cost in table["gradient_us"].items()},
            table["overlap"]["slowdown"],
            table["overlap"]["tensor_share"],
            table["overlap"]["pipelined_share"],
            table["overlap"]["expert_share"],
            table["alignment"]["irregular"],
            table["implicit"]["convolution"],
            table["scale"]["jitter"],
            table["scale"]["uneven_jitter"],
            tuple(FusedAttention(name, **entry) for name, entry in table["attention"].items()),
            table["optimizer"]["efficiency"],
            table["memory"],
            table["vector"]["flop_per_byte"],
            table["vector"]["exponent"],
            table["factor"],
        )

    def memory_factor(self, runner: str, gpu: Gpu) -> float:
        """Return the factor on the seconds of kernels bound by memory on a GPU."""
        flop_per_byte = gpu.peak("fp32") / gpu.memory_bandwidth_bytes_per_s
        return float(self.memory[runner] * (self.vector_flop_per_byte / flop_per_byte) ** self.vector_exponent)


@dataclass(frozen=True, slots=True)
class Widths:
    """Half-widths of 90 % ranges, as logarithms."""

    communication: float
    host: float
    slow_host: float
    """Logarithm of how much slower than forecast a slow host is."""
    kernels: float
    plans: float
    unstated: Mapping[str, float]


@cache
def shipped() -> Constants:
    """Return the fitted constants that ship with Tilecast."""
    return Constants.of(_table())


def with_values(moved: Mapping[str, float], table: Mapping[str, Any] | None = None) -> Constants:
    """Return the constants of a table with other values for some of them, by dotted path.

    Without a table, the fitted constants are used.
    """
    table = _table() if table is None else deepcopy(dict(table))
    for path, value in moved.items():
        *sections, name = path.split(".")
        place = table
        for section in sections:
            place = place[section]
        place[name] = value
    return Constants.of(table)


def scaled(places: Sequence[str], factor: float, table: Mapping[str, Any] | None = None) -> dict[str, float]:
    """Return the constants at some dotted paths times a factor, by their paths.

    A path to a section means all constants in it. Without a table, the fitted constants are used.
    """

    def under(path: str, value: Any) -> dict[str, float]:
        if not isinstance(value, dict):
            return {path: value * factor}
        return {place: one for name, item in value.items() for place, one in under(f"{path}.{name}", item).items()}

    values: dict[str, float] = {}
    for path in places:
        value: Any = _table() if table is None else table
        for key in path.split("."):
            value = value[key]
        values |= under(path, value)
    return values


@cache
def widths() -> Widths:
    """Return the widths of ranges that ship with Tilecast."""
    table = _table()
    return Widths(**table["range"], unstated=table["unstated"])


@cache
def digest() -> str:
    """Return the SHA-256 of the constants."""
    return hashlib.sha256(_text().encode()).hexdigest()


def _table() -> dict[str, Any]:
    return tomllib.loads(_text())


def _text() -> str:
    return files("tilecast").joinpath("constants.toml").read_text(encoding="utf-8")
