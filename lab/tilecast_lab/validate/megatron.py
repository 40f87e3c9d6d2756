"""Readers of tables of Megatron's operators: Aceso's layer profiles on V100, SimuMax's grouped expert GEMMs on A100."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from tilecast.spec import ELEMENT_BYTES, Floats
from tilecast_lab.validate.kernel_table import Builder, add_copy_kernels, each_precision

FAILED_US = 1e7
"""Microseconds that Aceso's profiler writes in place of a time if an operator ran out of memory."""
Chain: TypeAlias = tuple[tuple[float, float, float, float], ...]
CHAINS: Mapping[str, tuple[Chain, Chain]] = {
    "dropout": (((1, 1, 0, 1),), ((1, 1, 1, 0),)),
    "gelu": (((1, 1, 0, 0),), ((2, 1, 0, 0), (1, 0, 0, 0))),
    "bias_dropout_add": (((1, 1, 0, 0), (1, 1, 0, 1), (2, 1, 0, 0)), ((2, 1, 0, 0), (1, 0, 0, 0))),
}
"""Kernels of Megatron's element-wise operators, forward and backward.

Each kernel has the number of tensors that it reads and writes, and the bytes per element of the dropout mask that it
reads and writes. A bias adds a reduction over its gradient. TorchScript compiles `bias_dropout_add`; its derivative of
dropout multiplies by a mask of the tensor's own type.
"""


def grouped(b: Builder) -> None:
    """Add the kernels of a table of grouped GEMMs, which compute the products of all experts in one launch.

    A row is the forward product, the gradient of the tokens or the gradient of the weights.
    """
    groups, m, n, k = (b.number(name) for name in ("groups", "m", "n", "k"))
    stage = b.text("stage")
    products: dict[str, tuple[str, dict[str, Floats]]] = {
        "fwd": ("forward", {"m": m, "n": n, "k": k}),
        "bwd_grad_act": ("input gradient", {"m": m, "n": k, "k": n}),
        "bwd_grad_w": ("weight gradient", {"m": n, "n": k, "k": m}),
    }
    b.refuse(~np.isin(stage, list(products)), "unknown-pass")
    for precision, rows in each_precision(b):
        for name, (_, dims) in products.items():
            added = float(name == "bwd_grad_w")
            b.add(rows & (stage == name), "gemm", precision, batch=groups, accumulated=added, **dims)
    b.op = [f"grouped gemm {products[name][0]}" if name in products else "-" for name in stage]
    b.grouped("n", "k")


def operators(b: Builder) -> None:
    """Add the kernels of operators of a Megatron layer, timed forward or backward as a whole (Aceso's profiler)."""
    op, name, backward = b.text("op"), b.text("name"), b.text("pass") == "bwd"
    m, n, k, batch, rows, cols = (b.number(name) for name in ("m", "n", "k", "batch", "rows", "cols"))
    b.refuse(~np.isin(op, ["linear", "bmm", "scaled_causal_softmax", "layer_norm", *CHAINS]), "unknown-op")
    # The final norm includes a transpose. Column-parallel products exchange the gradient of their input between ranks.
    b.refuse(name == "final-layernorm", "composite-op")
    b.refuse((op == "linear") & backward & (b.number("tp", 1.0) > 1), "composite-op")
    # Megatron's fused softmax needs 16-bit scores and a multiple of four matrices; others are chains of eager kernels.
    fused = (rows / cols % 4 == 0) & (b.text("dtype") != "fp32")
    b.refuse((op == "scaled_causal_softmax") & ~fused, "composite-op")
    b.refuse(b.number("latency_us") >= FAILED_US, "did-not-run")
    for precision, chosen in each_precision(b):
        products = chosen & np.isin(op, ["linear", "bmm"])
        b.add(products & ~backward, "gemm", precision, batch=batch, m=m, n=n, k=k)
        b.add(products & backward, "gemm", precision, batch=batch, m=m, n=k, k=n)
        b.add(products & backward & (op == "linear"), "gemm", precision, batch=batch, m=n, n=k, k=m)
        b.add(products & backward & (op == "bmm"), "gemm", precision, batch=batch, m=k, n=n, k=m)
        # Queries, keys and values are copied into three tensors, the results of the heads into one.
        add_copy_kernels(b, chosen & (name == "enc-attention-qkv"), precision, m * n)
        add_copy_kernels(b, chosen & (name == "enc-attention-context"), precision, batch * m * n)
        # A causal row is read up to the diagonal, half of it on average, and written as a whole.
        moved = cols * np.where(backward, 2 / 3, 3 / 4)
        softmax = chosen & (op == "scaled_causal_softmax")
        b.add(softmax, "softmax", precision, rows=rows, cols=moved, backward=backward)
        norms = chosen & (op == "layer_norm")
        b.add(norms, "layernorm", precision, rows=rows, cols=cols, backward=backward)
        for word, (forward_chain, backward_chain) in CHAINS.items():
            for chain, here in ((forward_chain, ~backward), (backward_chain, backward)):
                for reads, writes, mask_reads, mask_writes in chain:
                    size = ELEMENT_BYTES[precision]
                    read, written = size * reads + mask_reads, size * writes + mask_writes
                    these = chosen & here & (op == word)
                    dims = {"read_bytes": read, "written_bytes": written, "drawn": float(mask_writes > 0)}
                    b.add(these, "elementwise", precision, elements=rows * cols, **dims)
    b.op = [f"megatron {word}{' backward' if back else ''}" for word, back in zip(op, backward, strict=True)]
    b.harness = "megatron"
    b.grouped("n", "k", "rows", "cols")
    b.varied("name")
