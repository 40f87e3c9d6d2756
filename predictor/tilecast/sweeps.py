"""Vary one number of a job or pool: the fields that can vary, and the values to try."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilecast.advice import Advice, Offer
from tilecast.advice.what_if.changes import with_pool_gpus
from tilecast.hardware import Link, LinkProtocol, Pool
from tilecast.spec import SpecError

MAX_VALUES = 256


@dataclass(frozen=True, slots=True)
class SweepValue:
    """A value to try, given as a number or as a multiple of the present value."""

    number: float
    is_factor: bool = False

    def resolve(self, present: float | None, flag: str) -> float:
        """Return the number to use in place of `present`.

        Raises:
            SpecError: the value is a multiple, but there is no present value.
        """
        if not self.is_factor:
            return self.number
        if present is None:
            raise SpecError(flag, f"x{self.number:g} multiplies what is not there", "give numbers instead")
        return present * self.number


@dataclass(frozen=True, slots=True)
class SweepRange:
    """A field of a job or pool, and the values to try in it."""

    field: str
    values: tuple[SweepValue, ...]

    @property
    def varies_pools(self) -> bool:
        """Whether the field belongs to the pools. False means a field of the job."""
        return self.field in FIELDS

    @classmethod
    def parse(cls, text: str, flag: str = "--over") -> SweepRange:
        """Parse `FIELD=VALUE,…`.

        A value is a number, `x0.5` for a multiple of the present value, `8..512` for every doubling, or `8..64..8` for
        even steps.

        Raises:
            SpecError: the text has another form, or requests too many values.
        """
        name, equals, listed = text.partition("=")
        name = name.strip().removeprefix("spec.")
        if not equals or not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*(\.[A-Za-z][A-Za-z0-9]*)*", name):
            raise SpecError(flag, f"cannot read {text[:60]!r}", "write for instance training.globalBatchSize=64,128")
        if name.split(".")[0] in ("pool", "gpu", "link") and name not in FIELDS:
            raise SpecError(flag, f"no pool has a number {name}", f"known: {', '.join(FIELDS)}")
        values = [value for item in listed.split(",") for value in _parse_values(item.strip(), flag)]
        if len(values) > MAX_VALUES:
            raise SpecError(flag, f"asks for {len(values):,} values", f"ask for at most {MAX_VALUES}")
        return cls(name, tuple(dict.fromkeys(values)))


def _parse_values(text: str, flag: str) -> list[SweepValue]:
    if ".." in text:
        parts = text.split("..")
        if not 2 <= len(parts) <= 3:
            raise SpecError(flag, f"cannot read the range {text!r}", "write FROM..TO or FROM..TO..STEP")
        low, high, *step = (_parse_number(part, flag) for part in parts)
        if not 0 < low <= high or (step and step[0] <= 0):
            raise SpecError(flag, f"the range {text} is empty", "let it rise from a positive number")
        count = (high - low) / step[0] if step else math.log2(high / low)
        if count > MAX_VALUES:
            raise SpecError(flag, f"the range {text} has {count:,.0f} values", f"ask for at most {MAX_VALUES}")
        whole = range(math.floor(count + 1e-9) + 1)
        return [SweepValue(low + step[0] * place if step else low * 2.0**place) for place in whole]
    if text.startswith("x"):
        return [SweepValue(_parse_number(text[1:], flag), is_factor=True)]
    return [SweepValue(_parse_number(text, flag))]


def _parse_number(text: str, flag: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1e18:
        raise SpecError(flag, f"{text[:40]!r} is no number from 0", "write for instance 64, 1e9 or x0.5")
    return value


@dataclass(frozen=True, slots=True)
class PoolField:
    """A numeric field of a pool: its unit, and functions that read and replace the number."""

    unit: str
    get: Callable[[Pool], float | None]
    put: Callable[[Pool, float], Pool]
    is_count: bool = False


def vary_pools(pools: Sequence[Pool], field: str, value: SweepValue, flag: str = "--over") -> list[Pool]:
    """Return the pools with another number in `field`, a key of `FIELDS`.

    Raises:
        SpecError: a pool cannot have this number.
    """
    known, changes = FIELDS[field], []
    for pool in pools:
        number = value.resolve(known.get(pool), flag)
        if known.is_count and (number != int(number) or number < 1):
            raise SpecError(flag, f"{field} of {number:g} is no count", "give whole numbers from 1")
        if field in ("pool.gpus", "pool.nodes") and number > _MOST:
            raise SpecError(flag, f"{field} of {number:g} is more than a pool has", f"give at most {_MOST}")
        if number <= 0 and field != "pool.price":
            raise SpecError(flag, f"{field} of {number:g} is not positive", "give more than 0")
        if known.unit in _LARGEST_IN and number > _LARGEST:
            raise SpecError(flag, f"{field} of {number:g} {known.unit} is more than there is", f"give {known.unit}")
        per_node = with_pool_gpus(pool, int(number)).gpus_per_node
        if field == "pool.gpus" and number > per_node and number % per_node:
            problem = f"{number:g} GPUs do not fill nodes of {per_node}"
            raise SpecError(flag, problem, f"give multiples of {per_node}, or fewer")
        changes.append(known.put(pool, number))
    return changes


_MOST = 2**20
"""Most nodes or GPUs of a pool, as for `--gpus`."""
_LARGEST = 1e6
_LARGEST_IN = ("GiB", "MiB", "GB/s")
"""Units in which no value reaches `_LARGEST`. A larger number was meant in bytes."""


def _with_gpu_count(pool: Pool, count: float) -> Pool:
    """Return the pool with `count` GPUs.

    Its nodes keep their size. If the pool is part of a node, they get the usual size.
    """
    if count < pool.gpus_per_node:
        return replace(pool, gpus_per_node=int(count), max_nodes=1, spare_gpus=0)
    return with_pool_gpus(pool, int(count))


def _build_gpu_sweep(name: str, unit: str, si: float, is_count: bool = False) -> PoolField:
    def put(pool: Pool, value: float) -> Pool:
        changed: dict[str, Any] = {name: int(value) if is_count else value * si}
        return replace(pool, gpu=replace(pool.gpu, **changed))

    return PoolField(unit, lambda pool: float(getattr(pool.gpu, name)) / si, put, is_count)


def _build_speed_sweep(name: str, unit: str, si: float, scaled: Sequence[str], is_count: bool = False) -> PoolField:
    """Return the field for a GPU number that sets the speed of arithmetic, such as the clock or the number of SMs.

    A change of this number changes all peak rates and the fields `scaled` in proportion, but not the power limit.
    """
    plain = _build_gpu_sweep(name, unit, si, is_count)

    def put(pool: Pool, value: float) -> Pool:
        gpu, factor = pool.gpu, value / (plain.get(pool) or 1.0)
        rates: dict[str, Any] = {rate: getattr(gpu, rate) * factor for rate in (*scaled, "fp16_accumulate_flops")}
        sustained = {
            key: min(1.0, share / factor) if share < 1 else share for key, share in gpu.sustained_ratio.items()
        }
        peaks = {key: peak * factor for key, peak in gpu.peak_flops.items()}
        faster = replace(gpu, peak_flops=peaks, sustained_ratio=sustained, **rates)
        return plain.put(replace(pool, gpu=faster), value)

    return PoolField(unit, plain.get, put, is_count)


def _with_link(pool: Pool, side: str, link: Link) -> Pool:
    return replace(pool, intra=link) if side == "intra" else replace(pool, inter=link)


def _build_link_sweep(side: str, name: str, unit: str, si: float = 1.0) -> PoolField:
    def put(pool: Pool, value: float) -> Pool:
        changed: dict[str, Any] = {name: value * si}
        return _with_link(pool, side, replace(getattr(pool, side), **changed))

    return PoolField(unit, lambda pool: float(getattr(getattr(pool, side), name)) / si, put)


def _build_latency_sweep(side: str) -> PoolField:
    """Return the field for a link's latency, which is the hop time of NCCL's Simple protocol.

    Other latencies change in proportion: other protocols, switch reductions, peers and the start of a collective.
    """

    def get(pool: Pool) -> float:
        link: Link = getattr(pool, side)
        return link.protocols["simple"].hop_s * 1e6

    def put(pool: Pool, value: float) -> Pool:
        link: Link = getattr(pool, side)
        factor = value / get(pool)
        slower = {
            name: LinkProtocol(one.start_s * factor, one.hop_s * factor, one.share)
            for name, one in link.protocols.items()
        }
        starts: dict[str, Any] = {name: getattr(link, name) * factor for name in ("reduction_start_s", "peer_s")}
        return _with_link(pool, side, replace(link, protocols=slower, **starts))

    return PoolField("us", get, put)


FIELDS: Mapping[str, PoolField] = {
    "pool.gpus": PoolField("", lambda pool: float(pool.max_gpus), _with_gpu_count, is_count=True),
    "pool.nodes": PoolField(
        "", lambda pool: float(pool.max_nodes), lambda pool, value: replace(pool, max_nodes=int(value)), is_count=True
    ),
    "pool.price": PoolField(
        "per GPU and hour",
        lambda pool: pool.price_per_gpu_hour,
        lambda pool, value: replace(pool, price_per_gpu_hour=value),
    ),
    "gpu.memory": _build_gpu_sweep("memory_bytes", "GiB", 2.0**30),
    "gpu.bandwidth": _build_gpu_sweep("memory_bandwidth_bytes_per_s", "GB/s", 1e9),
    "gpu.l2": _build_gpu_sweep("l2_bytes", "MiB", 2.0**20),
    "gpu.clock": _build_speed_sweep("boost_clock_hz", "MHz", 1e6, ("l2_bandwidth_bytes_per_s",)),
    "gpu.sms": _build_speed_sweep("sm_count", "", 1.0, (), is_count=True),
    "link.intraNode.bandwidth": _build_link_sweep("intra", "bandwidth_bytes_per_s", "GB/s", 1e9),
    "link.intraNode.latency": _build_latency_sweep("intra"),
    "link.interNode.bandwidth": _build_link_sweep("inter", "bandwidth_bytes_per_s", "GB/s", 1e9),
    "link.interNode.latency": _build_latency_sweep("inter"),
}
"""Every number of a pool that can vary, by name. Those of the job are the fields of its spec."""


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One value of a sweep, and the advice for it."""

    value: float
    label: str
    """The value as the user wrote it. A factor stays a factor."""
    advice: Advice

    @property
    def best(self) -> Offer | None:
        return self.advice.best


def throughput_per_gpu(offer: Offer) -> float:
    """Return the throughput of an offer per GPU, in tokens (or samples) per second."""
    return offer.tokens_per_s / offer.gpus


def relative_throughput(rows: Sequence[SweepRow], offer: Offer) -> float:
    """Return an offer's throughput per GPU, divided by the best throughput on its pool in any row, in (0, 1]."""
    same = (
        throughput_per_gpu(other) for row in rows for other in row.advice.offers if other.pool.name == offer.pool.name
    )
    return throughput_per_gpu(offer) / max(same)
