"""Overhead that a measuring harness adds to a kernel's own time.

Some tables were timed on the host, so their durations include the cost of the harness. `harness_of` returns that cost
for a kind of table; it is added to a prediction before the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tilecast.hardware import Gpu, find_gpu
from tilecast.spec import SpecError


@dataclass(frozen=True, slots=True)
class Harness:
    """Overhead of one way of measuring a kernel."""

    added_s: float = 0.0
    """Seconds added to every kernel: the events and the launch around it."""
    least_s: float = 0.0
    """Shortest time that can be measured, in seconds, because the host or the kernel's code cannot go faster."""
    times: float = 1.0
    """Factor by which the kernel that ran is slower than the one that is priced."""
    times_after_s: float = 0.0
    """Seconds of the priced kernel up to which the kernel that ran is as fast; `times` holds for what is beyond."""


HARNESS_SPREAD = 0.2
"""Relative half-width of the overhead's range: it differs between hosts and between runs."""
NEUSIGHT_LEAST_S: Mapping[str, float] = {
    "bmm": 31e-6, "linear": 53e-6, "softmax": 33e-6, "ln": 46e-6, "add": 26e-6, "mul": 26e-6, "div": 26e-6,
    "pow": 26e-6, "addu": 31e-6, "mulu": 31e-6, "divu": 31e-6, "powu": 29e-6, "relu": 31e-6, "gelu": 30e-6,
    "tanh": 25.5e-6,
}  # fmt: skip
"""Shortest duration in NeuSight's tables by op, in seconds: one eager PyTorch call between two events."""
NEUSIGHT_HOSTS: Mapping[str, float] = {"Tesla P100-PCIE-16GB": 1.65, "Tesla V100-PCIE-32GB": 1.25}
"""Factor by which the hosts of two of NeuSight's GPUs are slower than the others."""
NEUSIGHT_EXCEPTIONS: Mapping[tuple[str, str], float] = {
    ("Tesla P100-PCIE-16GB", "gelu"): 30e-6, ("Tesla P100-PCIE-16GB", "ln"): 46e-6,
}  # fmt: skip
"""Shortest durations of two ops that were evidently measured on another host, in seconds."""
NEUSIGHT_ADDED_SHARE = 0.6
"""Share of the shortest duration that remains as an offset of long kernels, read off NeuSight's large copies."""
VIDUR_SM_BYTES_PER_CLOCK: Mapping[str, float] = {
    "silu_and_mul": 6.6, "rope_qk": 5.7, "rmsnorm": 4.6, "layernorm": 6.4, "gelu": 8.6,
}  # fmt: skip
"""Bytes that one SM streams per clock in the kernels that vidur profiled (vLLM of 2023 and eager PyTorch).

They load half-precision words one by one, so on GPUs with fast DRAM the SMs bound them and not the DRAM.
"""
VIDUR_RAMP_S = 2e-6
VIDUR_STARTED_S = 1e-6
"""Part of a pointwise kernel's start that the profiler behind vidur's times does not count, in seconds."""
VIDUR_POINTWISE = ("add", "gelu", "rope_qk", "silu_and_mul")
HOPPER_FA2_TIMES: Mapping[str, float] = {"attention": 1.9, "attention backward": 1.75}
"""Time of FlashAttention-2 on Hopper over that of the kernels which Tilecast prices there, by op.

Tilecast prices the kernels of cuDNN and FlashAttention-3, which use Hopper's asynchronous units. The ratios are from
cudnn-frontend's own table.
"""
HOPPER_FA2_AFTER_S = 100e-6
"""Duration up to which the encoder kernels of `HOPPER_FA2_LIKE` are as fast as those of FlashAttention-3."""
HOPPER_FA2_LIKE = ("sglang:flash_attention_v3", "vllm:vllm_vit_flash_attn", "trtllm:torch_flow encoder")
"""Encoder kernels of aiconfigurator's tables that are as slow on Hopper as FlashAttention-2 if they run for long.

For the same shapes they take 1.5 to 3 times as long as FlashAttention-3 from 100 microseconds on, on H100 and H200.
"""
TRTLLM_HOPPER_ADDED_S, TRTLLM_HOPPER_TIMES = 4e-6, 1.1
"""Overhead of TensorRT-LLM's attention operator on Hopper, and its time over that of FlashAttention-3.

The operator also rotates queries and keys and writes the cache of keys and values. H100 and H200, in BF16 and FP8, each
yield the same figures.
"""
TRTLLM_TIMES = 1.35
"""Time of TensorRT-LLM's attention operator over that of FlashAttention-2, on Ampere and Ada."""
VLLM_FLASH = "vllm_flash_attn_fa"
VLLM_FLASH_ADDED_S = 1.5e-6
VLLM_FLASH_TIMES = 1.04
"""Factor on the time of vLLM's FlashAttention 2 and 3 in aiconfigurator's later runs, beside `VLLM_FLASH_ADDED_S`.

Both compare them with aiconfigurator's other flash kernels for the same shapes on L40S, H100 and H200.
"""
VLLM_A100_TIMES = 1.11
"""Time of vLLM's FlashAttention on A100 over that of SGLang's, for the same shapes."""
MEGATRON_LEAST_S: Mapping[str, float] = {
    "gemm": 63e-6, "megatron linear": 66e-6, "megatron linear backward": 118e-6, "megatron bmm": 63e-6,
    "megatron bmm backward": 115e-6, "megatron dropout": 57e-6, "megatron dropout backward": 57e-6,
    "megatron gelu": 33e-6, "megatron gelu backward": 90e-6, "megatron bias_dropout_add": 68e-6,
    "megatron bias_dropout_add backward": 70e-6, "megatron layer_norm": 41e-6, "megatron layer_norm backward": 92e-6,
}  # fmt: skip
"""Shortest duration in Aceso's tables by operator, in seconds.

Aceso's host issues the calls of an operator, or of its autograd graph, no faster.
"""
VLLM_BLOCK_LEAST_S: Mapping[str, float] = {
    "CutlassFp8BlockScaledMMKernel": 178e-6, "DeepGemmFp8BlockScaledMMKernel": 86e-6,
    "FlashInferFp8BlockScaledMMKernel": 59.5e-6, "TritonFp8BlockScaledMMKernel": 340e-6,
}  # fmt: skip
"""Shortest duration of vLLM's products with block scales by kernel, in seconds.

Their host casts the activations and issues the kernels no faster. H100 and H200 show the same figures for any shape.
"""
TRTLLM_FP8 = "torch_flow fp8"
TRTLLM_FP8_ADDED_S, TRTLLM_FP8_LEAST_S, TRTLLM_FP8_TIMES = 4e-6, 12.9e-6, 0.9
"""Seconds of TensorRT-LLM's cast of the activations before a product in FP8, and its shortest duration with it.

The last figure is the time of cuBLAS over that of CUTLASS, whose products are priced. H100 and H200 yield the same.
"""
DEEPGEMM = "sglang_deepgemm_gemm_nt_f8f8bf16"
DEEPGEMM_TIMES = 0.85
"""Time of DeepGEMM over that of CUTLASS, which casts the activations too and has wider tiles, on H100 and H200."""
APEX_LEAST_S = 14e-6
"""Seconds between the launches of the loop that apex_plus times, as its host issues them."""


def harness_of(kind: str, op: str, gpu: str, variant: str = "", moved_bytes: float = 0.0) -> Harness:
    """Return what a kind of table adds to the time of an op.

    Args:
        kind: harness of the table: "neusight", "vidur", "megatron", "apex_plus" or "".
        op: name of the op in the table.
        gpu: name of the GPU in the table.
        variant: which of several kernels ran, as the table calls it.
        moved_bytes: least bytes that the row's kernels read and write.
    """
    if kind == "neusight":
        usual_s = NEUSIGHT_LEAST_S.get(op, 0.0) * NEUSIGHT_HOSTS.get(gpu, 1.0)
        least_s = NEUSIGHT_EXCEPTIONS.get((gpu, op), usual_s)
        return Harness(NEUSIGHT_ADDED_SHARE * least_s, least_s)
    if kind == "vidur" and (known := gpu_of(gpu)):
        rate = known.sm_count * known.boost_clock_hz * VIDUR_SM_BYTES_PER_CLOCK.get(op, math.inf)
        return Harness(-VIDUR_STARTED_S if op in VIDUR_POINTWISE else 0.0, VIDUR_RAMP_S + moved_bytes / rate)
    if variant in VLLM_BLOCK_LEAST_S:
        return Harness(least_s=VLLM_BLOCK_LEAST_S[variant])
    if variant == TRTLLM_FP8:
        return Harness(TRTLLM_FP8_ADDED_S, TRTLLM_FP8_LEAST_S, TRTLLM_FP8_TIMES)
    if variant == DEEPGEMM:
        return Harness(times=DEEPGEMM_TIMES)
    if "trtllm" in variant and not is_hopper(gpu):
        return Harness(times=TRTLLM_TIMES)
    if variant in HOPPER_FA2_LIKE and is_hopper(gpu):
        added_s = TRTLLM_HOPPER_ADDED_S if "trtllm" in variant else 0.0
        return Harness(added_s, times=HOPPER_FA2_TIMES[op], times_after_s=HOPPER_FA2_AFTER_S)
    if "trtllm" in variant:
        return Harness(TRTLLM_HOPPER_ADDED_S, times=TRTLLM_HOPPER_TIMES)
    if VLLM_FLASH in variant:
        return Harness(VLLM_FLASH_ADDED_S, times=VLLM_FLASH_TIMES)
    if variant == "vllm:vllm_flash_attn" and (known := gpu_of(gpu)) and known.architecture == "ampere":
        return Harness(times=VLLM_A100_TIMES)
    if "FA2" in variant and is_hopper(gpu):
        return Harness(times=HOPPER_FA2_TIMES.get(op, 1.0))
    if kind == "megatron":
        return Harness(least_s=MEGATRON_LEAST_S.get(op, 0.0))
    return Harness(least_s=APEX_LEAST_S) if kind == "apex_plus" else Harness()


def gpu_of(name: str) -> Gpu | None:
    """Return the GPU of that name, or None if it is unknown."""
    try:
        return find_gpu(name)
    except SpecError:
        return None


def is_hopper(name: str) -> bool:
    """Return whether that name is of a known GPU of the Hopper architecture."""
    gpu = gpu_of(name)
    return gpu is not None and gpu.architecture == "hopper"
