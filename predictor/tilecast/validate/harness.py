"""What the ways of measuring kernels add to a kernel's own time.

Some tables were timed on the host, so that their durations hold the harness's own cost, which is no part of
a kernel: `harness` states it per table kind, and it is added before a prediction is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilecast.hardware import Gpu, find_gpu
from tilecast.spec import SpecError


@dataclass(frozen=True, slots=True)
class Harness:
    """What a way of measuring adds to a kernel's own time."""

    added_s: float = 0.0
    """Added to every kernel: the events and the launch around it."""
    least_s: float = 0.0
    """The shortest time it can show, as the host or the kernel's code cannot go faster."""
    times: float = 1.0
    """How much slower the kernel that ran is than the one that is priced."""


HARNESS_SPREAD = 0.2
"""Relative half-width of what a harness adds: hosts differ, and so do their moods."""
NEUSIGHT_LEAST_S: Mapping[str, float] = {
    "bmm": 31e-6, "linear": 53e-6, "softmax": 33e-6, "ln": 46e-6, "add": 26e-6, "mul": 26e-6, "div": 26e-6,
    "pow": 26e-6, "addu": 31e-6, "mulu": 31e-6, "divu": 31e-6, "powu": 29e-6, "relu": 31e-6, "gelu": 30e-6,
    "tanh": 25.5e-6,
}  # fmt: skip
"""The shortest durations of NeuSight's tables by op: one eager PyTorch call between two events."""
NEUSIGHT_HOSTS: Mapping[str, float] = {"Tesla P100-PCIE-16GB": 1.65, "Tesla V100-PCIE-32GB": 1.25}
"""How much slower than the others the hosts of two of its GPUs are."""
NEUSIGHT_EXCEPTIONS: Mapping[tuple[str, str], float] = {
    ("Tesla P100-PCIE-16GB", "gelu"): 30e-6, ("Tesla P100-PCIE-16GB", "ln"): 46e-6,
}  # fmt: skip
"""Two ops that were evidently measured on another host."""
NEUSIGHT_ADDED_SHARE = 0.6
"""Share of the shortest duration that remains as an offset once kernels are long, read off its large copies."""
VIDUR_SM_BYTES_PER_CLOCK: Mapping[str, float] = {
    "silu_and_mul": 6.6, "rope_qk": 5.7, "rmsnorm": 4.6, "layernorm": 6.4, "gelu": 8.6,
}  # fmt: skip
"""What one SM streams per clock in the kernels that vidur profiled (vLLM's of 2023 and eager PyTorch's). They load
half-precision words one by one, so that the SMs and not the DRAM bound them where DRAM is fast."""
VIDUR_RAMP_S = 2e-6
HOPPER_FA2_TIMES: Mapping[str, float] = {"attention": 1.9, "attention backward": 1.75}
"""FlashAttention-2 on Hopper against cuDNN's and FlashAttention-3's kernels, which use its asynchronous units and are
what the house prices there: the ratio in cudnn-frontend's own table."""
VLLM_FLASH = "vllm_flash_attn_fa"
VLLM_FLASH_ADDED_S = 1.5e-6
VLLM_FLASH_TIMES = 1.04
"""What aiconfigurator's later runs of vLLM's FlashAttention 2 and 3 take beyond its other flash kernels, for the same
shapes on L40S, H100 and H200."""
VLLM_A100_TIMES = 1.11
"""The same for vLLM's FlashAttention on A100, against SGLang's."""
MEGATRON_LEAST_S: Mapping[str, float] = {
    "gemm": 63e-6, "megatron linear": 66e-6, "megatron linear backward": 118e-6, "megatron bmm": 63e-6,
    "megatron bmm backward": 115e-6, "megatron dropout": 57e-6, "megatron dropout backward": 57e-6,
    "megatron gelu": 33e-6, "megatron gelu backward": 90e-6, "megatron bias_dropout_add": 68e-6,
    "megatron bias_dropout_add backward": 70e-6, "megatron layer_norm": 41e-6, "megatron layer_norm backward": 92e-6,
}  # fmt: skip
"""The shortest durations of Aceso's tables by operator: its host issues the calls of an operator, or of its autograd
graph, no faster."""
APEX_LEAST_S = 14e-6
"""apex_plus times a loop of launches, which its host issues every 14 microseconds."""


def harness(kind: str, op: str, gpu: str, variant: str = "", moved_bytes: float = 0.0) -> Harness:
    """What a kind of table adds to an op on a GPU of that name, for a row of that many least bytes."""
    if kind == "neusight":
        usual_s = NEUSIGHT_LEAST_S.get(op, 0.0) * NEUSIGHT_HOSTS.get(gpu, 1.0)
        least_s = NEUSIGHT_EXCEPTIONS.get((gpu, op), usual_s)
        return Harness(NEUSIGHT_ADDED_SHARE * least_s, least_s)
    if kind == "vidur" and op in VIDUR_SM_BYTES_PER_CLOCK and (known := gpu_of(gpu)):
        rate = known.sm_count * known.boost_clock_hz * VIDUR_SM_BYTES_PER_CLOCK[op]
        return Harness(least_s=VIDUR_RAMP_S + moved_bytes / rate)
    if VLLM_FLASH in variant:
        return Harness(VLLM_FLASH_ADDED_S, times=VLLM_FLASH_TIMES)
    if variant == "vllm:vllm_flash_attn" and (known := gpu_of(gpu)) and known.architecture == "ampere":
        return Harness(times=VLLM_A100_TIMES)
    if "FA2" in variant and (known := gpu_of(gpu)) and known.architecture == "hopper":
        return Harness(times=HOPPER_FA2_TIMES.get(op, 1.0))
    if kind == "megatron":
        return Harness(least_s=MEGATRON_LEAST_S.get(op, 0.0))
    return Harness(least_s=APEX_LEAST_S) if kind == "apex_plus" else Harness()


def gpu_of(name: str) -> Gpu | None:
    """The GPU of that name, or None where nobody knows it."""
    try:
        return find_gpu(name)
    except SpecError:
        return None
