"""Timing of kernels on the GPU with PyTorch; the only module of the package that uses the GPU.

It has never run on a GPU in this project: compare the first table of a new machine with one you trust.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .cases import DIRECTION, POINTWISE_INPUTS, KernelCase, Sizes, Words
from .tables import CollectError, Environment, SkippedError, Timing

BURST_S = 4e-3
"""Target length of a burst, in seconds: long compared to the half microsecond that an event resolves."""
MOST_CALLS = 40
"""Most calls in a burst; a GPU queues about a thousand kernels, and one call may be ten of them."""
REPEATS_S = 0.5
"""Time spent on the bursts of one kernel, in seconds; there are 3 to 15 of them."""
FIRST_SLEEP_CYCLES = 3_000_000
"""Cycles that the GPU first sleeps while the host queues a burst, about two milliseconds.

`time_settled_burst` doubles it.
"""
SLEEP_DOUBLINGS = 7
"""Number of sleeps that `time_settled_burst` tries."""
MEMORY_SHARE = 0.8
"""Largest share of the free device memory that the traffic of one call may fill."""


def burst_sizes(first_s: float) -> tuple[int, int]:
    """Return the calls per burst and the number of bursts for a kernel whose first call took `first_s` seconds."""
    calls = min(max(round(BURST_S / first_s), 1), MOST_CALLS)
    return calls, min(max(round(REPEATS_S / (calls * first_s)), 3), 15)


def count_buffer_sets(calls: int, moved_bytes: int, l2_bytes: int) -> int:
    """Return the number of buffer sets that a burst rotates over: one per call, or enough to exceed twice the L2."""
    return min(calls, 2 * l2_bytes // moved_bytes + 2)


def time_settled_burst(burst: Callable[[int], tuple[float, bool]]) -> float:
    """Return the seconds of one call in a burst that was queued completely before the GPU began it.

    The burst is repeated with twice the sleep until this succeeds.

    Args:
        burst: takes the cycles to sleep; returns the seconds of one call and whether the GPU began before the host had
            queued all calls.

    Raises:
        SkippedError: even the longest sleep is too short, because the call waits for the GPU.
    """
    for doubling in range(SLEEP_DOUBLINGS):
        seconds, early = burst(FIRST_SLEEP_CYCLES << doubling)
        if not early:
            return seconds
    raise SkippedError("host-bound", "the call waits for the GPU, so its launches would be timed")


LEAST_CAPABILITY: Mapping[str, tuple[int, int]] = {
    "fp32": (0, 0), "fp16": (5, 3), "tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9),
}  # fmt: skip
"""Least compute capability with units for a dtype; on older GPUs PyTorch emulates the dtype or ignores the request."""


LEAST_PYTORCH: Mapping[str, tuple[int, int]] = {"rms_norm": (2, 9)}
"""First PyTorch version in which an op is one kernel."""


def unsupported_reason(case: KernelCase, capability: tuple[int, int], pytorch: str) -> str:
    """Return why a GPU of this compute capability or this PyTorch version cannot run a case, empty if it can."""
    if capability < LEAST_CAPABILITY[case.words["dtype"]]:
        return f"no {case.words['dtype']} units"
    version = tuple(int(part) for part in re.findall(r"\d+", pytorch)[:2])
    least = LEAST_PYTORCH.get(case.words.get("op", ""), (0, 0))
    return f"not fused before PyTorch {least[0]}.{least[1]}" if version < least else ""


def driver_version(text: str) -> str:
    """Return the version in the text of /proc/driver/nvidia/version, or empty text if there is none."""
    match = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    return match[0] if match else ""


Call = Callable[[], Any]
"""Function without arguments that launches the kernel once."""


def _tensor(torch: ModuleType, dtype: str, *shape: int, learns: bool = False) -> Any:
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype, torch.float32)
    return torch.randn(shape, device="cuda", dtype=kind, requires_grad=learns)


def _indices(torch: ModuleType, high: int, *shape: int) -> Any:
    return torch.randint(high, shape, device="cuda")


def _direction(torch: ModuleType, forward: Call, inputs: Sequence[Any], backward: bool) -> Call:
    """Return the forward pass, or else run it once now and return its backward pass alone."""
    if not backward:
        return forward
    output = forward()
    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


def _gemm(torch: ModuleType, words: Words, sizes: Sizes) -> Call:
    batch, m, n, k = sizes["batch"], sizes["m"], sizes["n"], sizes["k"]
    lead = (batch,) if words["form"] == "batched" else ()
    a = _tensor(torch, words["dtype"], *lead, *((k, m) if words["trans_a"] == "T" else (m, k)))
    b = _tensor(torch, words["dtype"], *lead, *((n, k) if words["trans_b"] == "T" else (k, n)))
    if words["dtype"] == "fp8":
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")
        return lambda: torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    a = a.transpose(-2, -1) if words["trans_a"] == "T" else a
    b = b.transpose(-2, -1) if words["trans_b"] == "T" else b
    return lambda: torch.matmul(a, b)


SDPA_BACKENDS = {"flash_attention": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}


def _attention(torch: ModuleType, words: Words, sizes: Sizes) -> Call:
    module = importlib.import_module("torch.nn.attention")
    backend = getattr(module.SDPBackend, SDPA_BACKENDS[words["kernel"].split()[2]])
    batch, head_dim, dtype = sizes["batch"], sizes["head_dim"], words["dtype"]
    q = _tensor(torch, dtype, batch, sizes["heads"], sizes["seq_q"], head_dim, learns=True)
    k, v = (_tensor(torch, dtype, batch, sizes["kv_heads"], sizes["seq_kv"], head_dim, learns=True) for _ in range(2))
    grouped = {"enable_gqa": True} if sizes["heads"] > sizes["kv_heads"] else {}
    attention = torch.nn.functional.scaled_dot_product_attention

    def forward() -> Any:
        with module.sdpa_kernel(backend):
            return attention(q, k, v, is_causal=words["causal"] == "1", **grouped)

    return _direction(torch, forward, (q, k, v), words[DIRECTION] == "bwd")


def _norm(torch: ModuleType, words: Words, sizes: Sizes) -> Call:
    cols, functional = sizes["cols"], torch.nn.functional
    x = _tensor(torch, words["dtype"], sizes["rows"], cols, learns=True)
    weight, bias = (_tensor(torch, words["dtype"], cols, learns=True) for _ in range(2))
    forward, inputs = {
        "layer_norm": (lambda: functional.layer_norm(x, (cols,), weight, bias), (x, weight, bias)),
        "rms_norm": (lambda: functional.rms_norm(x, (cols,), weight), (x, weight)),
        "softmax": (lambda: torch.softmax(x, -1), (x,)),
    }[words["op"]]
    return _direction(torch, forward, inputs, words[DIRECTION] == "bwd")


def _elementwise(torch: ModuleType, words: Words, sizes: Sizes) -> Call:
    shape = (sizes["rows"], sizes["cols"])
    inputs = [_tensor(torch, words["dtype"], *shape) for _ in range(POINTWISE_INPUTS[words["op"]])]
    function = {
        "add": torch.add, "mul": torch.mul, "copy": torch.clone, "gelu": torch.nn.functional.gelu, "relu": torch.relu,
    }[words["op"]]  # fmt: skip
    return lambda: function(*inputs)


def _cross_entropy(torch: ModuleType, words: Words, sizes: Sizes) -> Call:
    tokens = sizes["B"] * sizes["T"]
    logits = _tensor(torch, words["dtype"], tokens, sizes["V"], learns=True)
    labels = _indices(torch, sizes["V"], tokens)
    return _direction(
        torch, lambda: torch.nn.functional.cross_entropy(logits, labels), (logits,), words[DIRECTION] == "backward"
    )


def _embedding(torch: ModuleType, words: Words, sizes: Sizes) -> Call:
    table = _tensor(torch, words["dtype"], sizes["V"], sizes["D"], learns=True)
    tokens = _indices(torch, sizes["V"], sizes["B"], sizes["T"])
    return _direction(
        torch, lambda: torch.nn.functional.embedding(tokens, table), (table,), words[DIRECTION] == "backward"
    )


def _conv2d(torch: ModuleType, words: Words, sizes: Sizes) -> Call:
    layout = torch.channels_last if words["layout"] == "nhwc" else torch.contiguous_format
    dtype, groups = words["dtype"], sizes["groups"]
    x = _tensor(torch, dtype, sizes["batch"], sizes["c_in"], sizes["h"], sizes["w"]).to(memory_format=layout)
    shape = (sizes["c_out"], sizes["c_in"] // groups, sizes["kh"], sizes["kw"])
    weight = _tensor(torch, dtype, *shape).to(memory_format=layout)
    stride, pad = (sizes["stride_h"], sizes["stride_w"]), (sizes["pad_h"], sizes["pad_w"])

    def forward() -> Any:
        return torch.nn.functional.conv2d(x, weight, stride=stride, padding=pad, groups=groups)

    if words[DIRECTION] == "fwd":
        return forward
    gradient = torch.randn_like(forward())
    mask = [words[DIRECTION] == "bwd_data", words[DIRECTION] == "bwd_weight", False]
    backward = torch.ops.aten.convolution_backward
    return lambda: backward(gradient, x, weight, None, stride, pad, (1, 1), False, (0, 0), groups, mask)


def _optimizer(torch: ModuleType, words: Words, sizes: Sizes) -> Call:
    parameters = [_tensor(torch, words["dtype"], sizes["cols"], learns=True) for _ in range(sizes["rows"])]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    kind, options = {
        "sgd": ("SGD", {}), "momentum": ("SGD", {"momentum": 0.9}), "adam": ("Adam", {}), "adamw": ("AdamW", {}),
    }[words["op"]]  # fmt: skip
    step: Call = getattr(torch.optim, kind)(parameters, lr=1e-4, fused=True, **options).step
    return step


LAUNCHERS: Mapping[str, Callable[[ModuleType, Words, Sizes], Call]] = {
    "gemm": _gemm, "attention": _attention, "norm": _norm, "elementwise": _elementwise,
    "cross_entropy": _cross_entropy, "embedding": _embedding, "conv2d": _conv2d, "optimizer": _optimizer,
}  # fmt: skip
"""Functions by kind that fill random buffers on the GPU and return the call on them that is timed."""


class Device:
    """Current CUDA device in PyTorch, as a `Measure`."""

    def __init__(self) -> None:
        """Open the current CUDA device.

        Raises:
            CollectError: PyTorch or a CUDA device is missing.
        """
        try:
            self.torch = torch = importlib.import_module("torch")
        except ImportError:
            raise CollectError(
                "torch: not installed; run this where PyTorch with CUDA is, for instance in a pytorch/pytorch image"
            ) from None
        if torch.version.cuda is None or not torch.cuda.is_available():
            raise CollectError(
                f"CUDA: PyTorch {torch.__version__} finds no CUDA GPU; run on a GPU node with a CUDA build of PyTorch"
            )
        facts = torch.cuda.get_device_properties(0)
        self.capability = (int(facts.major), int(facts.minor))
        self.l2_bytes = int(getattr(facts, "L2_cache_size", 0)) or 64 * 2**20
        driver = Path("/proc/driver/nvidia/version")
        self.environment = Environment(
            gpu=str(torch.cuda.get_device_name(0)),
            driver=driver_version(driver.read_text()) if driver.exists() else "",
            cuda=str(torch.version.cuda),
            pytorch=str(torch.__version__),
        )
        torch.backends.cudnn.benchmark = True
        self.flush = torch.zeros(2 * self.l2_bytes // 4, device="cuda")

    def __call__(self, case: KernelCase) -> Timing:
        """Measure one case.

        Raises:
            SkippedError: the case does not fit, is not supported, or cannot be timed without the host.
            CollectError: CUDA failed in a way that spoils every later kernel.
        """
        if reason := unsupported_reason(case, self.capability, self.environment.pytorch):
            raise SkippedError(reason)
        # The error keeps the frames of the failed call, and so its buffers, alive until its handler ends.
        try:
            return self._timing(case)
        except self.torch.cuda.OutOfMemoryError:
            skip = SkippedError("out of memory")
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as error:
            skip = SkippedError("unsupported", (str(error).splitlines() or [type(error).__name__])[0][:200])
        try:
            self.torch.cuda.synchronize()
            self.torch.cuda.empty_cache()
        except RuntimeError as error:
            raise CollectError(f"CUDA: {case} broke the device ({str(error).splitlines()[0]}); start anew") from None
        raise skip

    def _timing(self, case: KernelCase) -> Timing:
        torch = self.torch
        if case.moved_bytes > MEMORY_SHARE * (torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()):
            raise SkippedError("out of memory")
        tf32 = case.words["dtype"] == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        launcher = LAUNCHERS[case.kind.name]
        calls = [launcher(torch, case.words, case.sizes)]
        self._warm(calls)
        count, repeats = burst_sizes(time_settled_burst(lambda cycles: self._burst(calls, 1, cycles)))
        sets = count_buffer_sets(count, case.moved_bytes, self.l2_bytes)
        calls += [launcher(torch, case.words, case.sizes) for _ in range(sets - 1)]
        self._warm(calls)
        return Timing.of([time_settled_burst(lambda cycles: self._burst(calls, count, cycles)) for _ in range(repeats)])

    def _warm(self, calls: Sequence[Call]) -> None:
        """Run every call twice, so that libraries choose their kernels and the allocator gets its blocks."""
        for _ in range(2):
            outputs = [call() for call in calls]
            self.torch.cuda.synchronize()
            del outputs

    def _burst(self, calls: Sequence[Call], count: int, cycles: int) -> tuple[float, bool]:
        """Time `count` calls queued behind a sleep of `cycles` cycles.

        Return the seconds of one call, and whether the sleep ended before all calls were queued.

        Results are kept for one turn of the rotation, so that outputs rotate like the inputs. The L2 is filled by
        reading, because written data would be written back during the burst.
        """
        cuda = self.torch.cuda
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        outputs: list[Any] = [None] * len(calls)
        self.flush.sum()
        cuda._sleep(cycles)
        start.record()
        for turn in range(count):
            outputs[turn % len(calls)] = calls[turn % len(calls)]()
        end.record()
        early = bool(start.query())
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / count, early
