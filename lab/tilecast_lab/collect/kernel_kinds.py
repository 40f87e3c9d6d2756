"""Kinds of the kernels that a training step launches, by their names in profiles of PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

PATTERNS: Mapping[str, str] = {
    "compiled": r"^triton_",
    "attention": r"sdpa|flash_(?:fwd|bwd)|pytorch_flash|fmha|cudnn::fusion::(?:compute_dot_do_o|convert_dq)",
    "convolution": r"fprop|dgrad|wgrad|implicit_gemm|convolve|conv_depthwise|conv2d|\bconv\b|cudnn_infer|winograd",
    "optimizer": r"multi_tensor_apply|FusedOptimizer",
    "softmax": r"SoftMax|softmax|nll_loss",
    "norm": r"layer_norm|GammaBeta|batch_?norm|\bbn_[fb]w|RowwiseMoments|rms_norm",
    "gemm": r"nvjet|gemm|cutlass|splitK|gemv|cublas",
    "copy": r"copy_kernel|Memcpy|CatArray|tensorTransform|nchwToNhwc|nhwcToNchw|FillFunctor|Memset",
    "reduction": r"reduce_kernel|\bscan\b|cumsum",
    "elementwise": r"elementwise|dropout|masked_scale",
}
"""Pattern by kind; the first one that a kernel's name matches is its kind. Copies include casts between types."""
KINDS = (*PATTERNS, "other")


def seconds_by_kind(kernels: Iterable[tuple[str, int, float]], busy_s: float) -> dict[str, float]:
    """Return the seconds of each kind.

    Args:
        kernels: names with launches and seconds.
        busy_s: seconds in which any kernel ran; what the kernels listed do not explain of it is "other".
    """
    found = dict.fromkeys(KINDS, 0.0)
    for name, _, seconds in kernels:
        found[kind_of(name)] += seconds
    found["other"] += max(0.0, busy_s - sum(found.values()))
    return found


def kind_of(name: str) -> str:
    """Return the kind of a kernel."""
    return next((kind for kind, pattern in PATTERNS.items() if re.search(pattern, name)), "other")
