"""Derive GPUs that no shipped file describes completely.

A board with another memory, power or clock is derived from its sibling, a shipped GPU with the same chip and form
factor. If a GPUPool contains incomplete specifications of a shipped GPU, its file supplies the missing numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

from tilecast import shipped
from tilecast.hardware.products import Gpu
from tilecast.hardware.schema import BoardsFile, GpuFile, normalise_product
from tilecast.spec import SpecError

GIB = 2**30
_MEMORY, _POWER, _CLOCK = (re.compile(rf"(\d{{1,4}}){unit}") for unit in ("gi?b?", "w", "mhz"))
_TYPE = re.compile(r"hbm\d?[a-z]?|gddr\d[a-z]?")


@dataclass(frozen=True, slots=True)
class _BoardName:
    """Words of a normalised product string, sorted into chip and form factor, memory, power and clock."""

    stem: str
    """Words that name the chip and the form factor."""
    memory_gb: int | None = None
    memory_type: str = ""
    power_w: int | None = None
    clock_mhz: int | None = None

    @classmethod
    def parse(cls, product: str) -> _BoardName:
        """Return the sorted words of a normalised product string such as `h100-sxm-64gb-hbm2e`."""
        stem: list[str] = []
        found: dict[str, Any] = {}
        for word in product.split("-"):
            for field, pattern in (("memory_gb", _MEMORY), ("power_w", _POWER), ("clock_mhz", _CLOCK)):
                match = pattern.fullmatch(word)
                if match and field not in found:
                    found[field] = int(match[1])
                    break
            else:
                if _TYPE.fullmatch(word) and "memory_type" not in found:
                    found["memory_type"] = word
                else:
                    stem.append(word)
        return cls("-".join(stem), **found)

    def find_nominal_gb(self, gpu: Gpu) -> float:
        """Return the memory size in GB from the product string, or else the GPU's memory in GiB.

        A size that is far off is ignored, because it is the host's memory.
        """
        whole = gpu.memory_bytes / GIB
        return self.memory_gb if self.memory_gb and _is_nearly_equal(self.memory_gb, whole) else whole

    @property
    def is_variant(self) -> bool:
        """Whether the product string names a memory size or type, a power or a clock."""
        return any((self.memory_gb, self.memory_type, self.power_w, self.clock_mhz))


@cache
def read_boards() -> BoardsFile:
    """Return the content of `boards.toml`."""
    return BoardsFile.model_validate(shipped.read_table("tilecast.hardware", "boards.toml"))


def derive_board(product: str, table: Mapping[str, Gpu]) -> Gpu | None:
    """Return the GPU that a product string describes: a shipped GPU, or a variant of it.

    Return None if no shipped GPU has the chip and form factor in the string, or if the string names neither memory nor
    power nor clock.

    The board is derived from its sibling. This is the shipped GPU with the same chip and form factor and the nearest
    memory size. If the string names a type of memory, the board has as many stacks of this type as its size needs. If
    the string names no type, a board with twice or half the memory has as many chips of another density and the same
    bandwidth. Memory of another size has a bandwidth proportional to the size. The sustained rates of tensor cores grow
    with the cube root of power. All rates of the chip are proportional to its clock.

    Args:
        product: the product string, normalised by `normalise_product`.
        table: the shipped GPUs by name.

    Raises:
        SpecError: the memory, power or clock differs too much from that of the sibling.
    """
    board = _BoardName.parse(product)
    related = [(gpu, known) for gpu in table.values() for known in map(_BoardName.parse, gpu.aliases)
               if known.stem == board.stem]  # fmt: skip
    if not related or not board.is_variant:
        return None

    def distance(pair: tuple[Gpu, _BoardName]) -> tuple[float, bool, bool, int]:
        gpu, known = pair
        nominal = known.find_nominal_gb(gpu)
        other_type = board.memory_type not in ("", known.memory_type)
        # Without a stated size, the GPU that the chip and form alone name is the sibling.
        other_size = board.memory_gb is None and known.is_variant
        return abs(math.log((board.memory_gb or nominal) / nominal)), other_type, other_size, len(gpu.name)

    gpu, known = min(related, key=distance)
    limits, changes, words = read_boards(), dict[str, Any](), [gpu.name]

    def require(name: str, ratio: float, value: str) -> None:
        if not 1 / limits.max_ratio <= ratio <= limits.max_ratio:
            problem = f"{value} of {name} is {ratio:.2g} times that of {gpu.name}"
            raise SpecError("gpu", problem, "correct it, or give the facts of the GPU in a GPUPool")

    nominal = known.find_nominal_gb(gpu)
    size = board.memory_gb or nominal
    is_same_size = _is_nearly_equal(size, nominal) or _is_nearly_equal(size, gpu.memory_bytes / GIB)
    bandwidth = _estimate_bandwidth(gpu, size, nominal, board.memory_type)
    has_same_rate = _is_nearly_equal(bandwidth, gpu.memory_bandwidth_bytes_per_s)
    if not is_same_size or not has_same_rate:
        require("memory", size / nominal, f"{size:g} GB")
        words += [f"{size:g}gb", *filter(None, [board.memory_type])]
        changes["memory_bytes"] = gpu.memory_bytes * (1.0 if is_same_size else size / nominal)
        changes["memory_bandwidth_bytes_per_s"] = bandwidth
    if board.power_w and not _is_nearly_equal(board.power_w, gpu.tdp_w):
        require("power", board.power_w / gpu.tdp_w, f"{board.power_w} W")
        words.append(f"{board.power_w}w")
        share = (board.power_w / gpu.tdp_w) ** (1 / 3)
        changes["tdp_w"] = float(board.power_w)
        changes["sustained_ratio"] = {
            name: ratio if name == "fp32" else min(1.0, ratio * share) for name, ratio in gpu.sustained_ratio.items()
        }
    if board.clock_mhz and board.clock_mhz * 1e6 != gpu.boost_clock_hz:
        faster = board.clock_mhz * 1e6 / gpu.boost_clock_hz
        require("clock", faster, f"{board.clock_mhz} MHz")
        words.append(f"{board.clock_mhz}mhz")
        changes |= {name: getattr(gpu, name) * faster for name in CLOCKED}
        changes["peak_flops"] = {name: rate * faster for name, rate in gpu.peak_flops.items()}
    if not changes:
        return gpu
    name = "-".join(words)
    aliases = (normalise_product(name), product)
    return replace(gpu, name=name, product=name.upper(), aliases=aliases, sibling=gpu.name, **changes)


def describe_board(gpu: Gpu, sibling: GpuFile) -> GpuFile:
    """Return a GPU file for a board: its sibling's file with the board's own numbers.

    Args:
        gpu: the board that `derive_board` returned.
        sibling: the file of the shipped GPU from which the board is derived.
    """
    figures = {
        "name": gpu.name,
        "product": gpu.product,
        "memory_gib": gpu.memory_bytes / GIB,
        "memory_bandwidth_gb_per_s": gpu.memory_bandwidth_bytes_per_s / 1e9,
        "l2_bandwidth_gb_per_s": gpu.l2_bandwidth_bytes_per_s / 1e9,
        "boost_clock_mhz": gpu.boost_clock_hz / 1e6,
        "tdp_w": gpu.tdp_w,
        "fp16_accumulate_tflops": gpu.fp16_accumulate_flops / 1e12 or None,
        "aliases": (),
        "peak_tflops": {name: rate / 1e12 for name, rate in gpu.peak_flops.items()},
        "sustained_ratio": {name: ratio for name, ratio in gpu.sustained_ratio.items() if ratio < 1},
        "sources": {"board": f"derived from {sibling.name} by the name (boards.toml)", **sibling.sources},
    }
    return sibling.model_copy(update=figures)


CLOCKED = ("boost_clock_hz", "l2_bandwidth_bytes_per_s", "fp16_accumulate_flops")
"""Rates of a chip, other than peak FLOP/s, that are proportional to its clock."""


def _is_nearly_equal(first: float, second: float) -> bool:
    """Return whether the relative difference of two numbers is at most `same_size` in `boards.toml`."""
    return abs(first / second - 1) <= read_boards().same_size


def _estimate_bandwidth(gpu: Gpu, size: float, nominal: float, memory_type: str) -> float:
    """Return the memory bandwidth of a board in bytes per second.

    Args:
        gpu: the shipped GPU from which the board is derived.
        size: memory of the board in GB.
        nominal: memory of `gpu` in GB.
        memory_type: type of the board's memory, such as `hbm3`. An empty type stands for the type of `gpu`.
    """
    stack = read_boards().stacks.get(memory_type)
    if stack is not None:
        return size / stack.gb * stack.bandwidth_gb_per_s * 1e9
    is_alike = any(_is_nearly_equal(size / nominal, factor) for factor in (0.5, 1.0, 2.0))
    return gpu.memory_bandwidth_bytes_per_s * (1.0 if is_alike else size / nominal)


FIGURES = ("compute_capability", "sm_count", "memory_bandwidth_gb_per_s", "boost_clock_mhz", "tdp_w")
"""Numbers that together identify the product of a GPU."""


def complete_specifications(specifications: GpuFile, shipped_files: Iterable[GpuFile]) -> tuple[GpuFile, str]:
    """Return a user's specifications with missing numbers filled in, and the name of the shipped GPU they come from.

    Only the rate of FP16 accumulation and the sustained ratios can be missing. They come from the shipped file of the
    product. A file is of the product if the product strings are equal, or if all `FIGURES` and the peak rates are
    close. If no shipped file is of the product, return the specifications unchanged and an empty name.

    Args:
        specifications: the specifications of a GPU that a user wrote.
        shipped_files: the GPU files that ship with Tilecast.
    """
    key, files = normalise_product(specifications.product), list(shipped_files)
    named = (one for one in files if key in map(normalise_product, (one.name, one.product, *one.aliases)))
    alike = (
        item
        for item in files
        if all(_is_close(specifications, item, name) for name in FIGURES) and _has_same_peaks(specifications, item)
    )
    same = next(chain(named, alike), None)
    if same is None:
        return specifications, ""
    missing: dict[str, Any] = {}
    peaks = specifications.peak_tflops
    if specifications.fp16_accumulate_tflops is None and same.fp16_accumulate_tflops and "fp16" in peaks:
        scale = peaks["fp16"] / same.peak_tflops["fp16"]
        missing["fp16_accumulate_tflops"] = same.fp16_accumulate_tflops * scale
    if not specifications.sustained_ratio:
        missing["sustained_ratio"] = same.sustained_ratio
    return specifications.model_copy(update=missing), same.name


def _is_close(first: GpuFile, second: GpuFile, name: str) -> bool:
    """Return whether two GPU files have nearly equal values in the field `name`.

    Their relative difference may be at most `same_figure` in `boards.toml`.
    """
    return math.isclose(getattr(first, name), getattr(second, name), rel_tol=read_boards().same_figure)


def _has_same_peaks(first: GpuFile, second: GpuFile) -> bool:
    """Return whether every peak rate in `first` is close to the peak rate of that precision in `second`."""
    return all(
        math.isclose(rate, second.peak_tflops.get(name, 0.0), rel_tol=read_boards().same_figure)
        for name, rate in first.peak_tflops.items()
    )
