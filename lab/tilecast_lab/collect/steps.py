"""Measurement of whole training steps and their memory on one GPU, into a table that `tilecast validate runs` reads.

It runs as `python -m tilecast_lab.collect steps`, or alone as `python -m collect steps` from the folder above it, with
PyTorch, transformers and torchvision. Models have random weights, and all data is random and on the device.

Neighbouring cases of one library run in one process, and after a fault of the GPU the rest of them in a new one. The
next process imports its libraries meanwhile. Each case begins with an empty allocator. After warm-up its steps run
without a pause between CUDA events; the row has their median. Then two steps run with a pause before each, for the
seconds of the host alone, and one runs under PyTorch's profiler: `kernels.csv` lists its kernels. A case that fails
becomes a row with the reason.
"""

from __future__ import annotations

import argparse
import csv
import gc
import importlib
import importlib.util
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import groupby, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from . import step_models
from .device import driver_version
from .kernel_kinds import seconds_by_kind
from .step_cases import CLIPPED, COLUMNS, MEASURED, MODELS, StepCase, plan_steps, table_row
from .tables import CollectError

WARM_STEPS, TIMED_STEPS = 5, 10
LONGEST_S = 2.0
"""Seconds after which the timed steps of a case end; three run at least."""
IMPORT_FAILED = "a process ended as it imported its libraries; its error stands above"
CASE_LIMIT_S = 100.0
"""Seconds after which a case is given up and its process ended."""
GIB = 2**30
LIBRARIES = ("torch", "transformers", "torchvision")
KERNEL_COLUMNS = ("id", "case", "kernel", "launches", "seconds")
MOST_KERNELS = 60
"""Number of kernels, by their total time, that are listed for a case."""
Values = dict[str, Any]
NumberedCase = tuple[int, StepCase]
"""Case with its place in the plan."""


class TrainingStep:
    """Training step of a case: forward and backward passes of all micro-batches, clipping and update."""

    def __init__(self, case: StepCase, device: str, tiny: bool) -> None:
        self.torch = importlib.import_module("torch")
        self.case, self.device = case, device
        self.built = step_models.build_model(case, device, tiny)
        self.optimizers = step_models.make_optimizers(case, self.built.module)
        self.clips = MODELS[case.model].library == "transformers"
        self.scaler = self.torch.amp.GradScaler(device) if case.recipe == "amp-fp16" else None

    def run(self, mark: Callable[[str], None] = lambda part: None) -> None:
        """Run one step; `mark` is called with the name of each part when the host has launched it."""
        with step_models.force_attention(self.case):
            for _ in range(self.case.accumulation):
                with step_models.cast_automatically(self.case, self.device):
                    loss = self.built.loss() / self.case.accumulation
                mark("forward")
                (self.scaler.scale(loss) if self.scaler else loss).backward()
                del loss
                mark("backward")
        for optimizer in self.optimizers:
            if self.scaler and self.clips:
                self.scaler.unscale_(optimizer)
        if self.clips:
            self.torch.nn.utils.clip_grad_norm_(self.built.module.parameters(), CLIPPED)
        for optimizer in self.optimizers:
            if self.scaler:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
        if self.scaler:
            self.scaler.update()
        mark("update")
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)


def measure_step(
    case: StepCase, device: str = "cuda", tiny: bool = False
) -> tuple[Values, list[tuple[str, int, float]]]:
    """Measure a case.

    Returns:
        Columns of `MEASURED` with `step_s` and `peak_gib`, and the kernels of a step: name, launches and seconds.
    """
    torch = importlib.import_module("torch")
    is_tf32 = case.recipe == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = is_tf32
    torch.backends.cudnn.benchmark = MODELS[case.model].library == "torchvision"
    cuda = torch.cuda if device == "cuda" else None
    if cuda:
        cuda.init()
        torch._C._cuda_clearCublasWorkspaces()
        cuda.empty_cache()
        cuda.reset_peak_memory_stats()
    step = TrainingStep(case, device, tiny)
    found: Values = {"parameters": sum(one.numel() for one in step.built.module.parameters())}
    peak = _MemoryReadings(cuda, found)
    for number in range(WARM_STEPS if cuda else 1):
        marks = {0: peak.mark_first_step, 2: peak.mark_part}
        if number == 2:
            peak.begin_parts()
        begin = time.perf_counter()
        step.run(marks.get(number, lambda part: None))
        _synchronize(cuda)
        took = time.perf_counter() - begin
    found |= _time_steps(cuda, step, took)
    found["peak_gib"] = peak.highest()
    kernels: list[tuple[str, int, float]] = []
    if cuda:
        found["host_s"] = min(_time_host(cuda, step) for _ in range(2))
        kernels, found["busy_s"] = _profile_kernels(torch, step)
        found["kernels_per_step"] = sum(launches for _, launches, _ in kernels)
        found |= {f"{kind}_s": seconds for kind, seconds in seconds_by_kind(kernels, found["busy_s"]).items()}
    return found, kernels[:MOST_KERNELS]


def _synchronize(cuda: Any) -> None:
    if cuda:
        cuda.synchronize()


class _MemoryReadings:
    """Memory of a case's tensors at the parts of a step, in GiB, added to the values found of it."""

    def __init__(self, cuda: Any, found: Values) -> None:
        self.cuda, self.found, self.most = cuda, found, 0.0
        if cuda:
            found["weights_gib"] = cuda.memory_allocated() / GIB

    def mark_first_step(self, part: str) -> None:
        """Read what the states take after the first update, with the gradients."""
        if self.cuda and part == "update":
            self.found["states_gib"] = self.cuda.memory_allocated() / GIB

    def begin_parts(self) -> float:
        """Begin the next part, and return the peak since the last one began."""
        if not self.cuda:
            return 0.0
        peak = float(self.cuda.max_memory_allocated()) / GIB
        self.most = max(self.most, peak)
        self.cuda.reset_peak_memory_stats()
        return peak

    def mark_part(self, part: str) -> None:
        """Read the peak of a part and begin the next; of several micro-batches the last one counts."""
        if self.cuda and part == "forward":
            self.found["forward_gib"] = self.cuda.memory_allocated() / GIB
        self.found[f"peak_{part}_gib"] = self.begin_parts()

    def highest(self) -> float | str:
        """Return the peak of all steps so far, and add that of what the allocator held."""
        if not self.cuda:
            return ""
        self.found["peak_reserved_gib"] = self.cuda.max_memory_reserved() / GIB
        return max(self.most, float(self.cuda.max_memory_allocated()) / GIB)


def _time_steps(cuda: Any, step: TrainingStep, took_s: float) -> Values:
    """Time steps that follow each other without a pause."""
    count = min(max(round(LONGEST_S / took_s), 3), TIMED_STEPS)
    if not cuda:
        step.run()
        return {"step_s": took_s, "steps": 1}
    events = [cuda.Event(enable_timing=True) for _ in range(count + 1)]
    begin = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        step.run()
        event.record()
    state = _read_gpu_state(cuda)
    cuda.synchronize()
    wall_s = (time.perf_counter() - begin) / count
    seconds = [first.elapsed_time(last) * 1e-3 for first, last in pairwise(events)]
    return {
        "step_s": statistics.median(seconds), "fastest_s": min(seconds), "slowest_s": max(seconds), "steps": count,
        "wall_s": wall_s, **state,
    }  # fmt: skip


def _read_gpu_state(cuda: Any) -> Values:
    """Return clock, power and temperature of the busy GPU, empty where the driver's library is missing."""
    try:
        return {
            "clock_mhz": cuda.clock_rate(),
            "power_w": cuda.power_draw() / 1000,
            "temperature_c": cuda.temperature(),
        }
    except (RuntimeError, ImportError, AttributeError):
        return {}


def _time_host(cuda: Any, step: TrainingStep) -> float:
    """Return the seconds that the host needs to launch a step on an idle GPU."""
    cuda.synchronize()
    begin = time.perf_counter()
    step.run()
    took = time.perf_counter() - begin
    cuda.synchronize()
    return took


def _profile_kernels(torch: Any, step: TrainingStep) -> tuple[list[tuple[str, int, float]], float]:
    """Return the kernels of a step with launches and seconds, longest first, and the seconds in which any ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step.run()
        torch.cuda.synchronize()
    events = [
        (event.name(), event.start_ns() * 1e-9, event.duration_ns() * 1e-9)
        for event in profile.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
    ]
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    busy, end = 0.0, 0.0
    for name, start, seconds in sorted(events, key=lambda event: event[1]):
        sums[name][0] += 1
        sums[name][1] += seconds
        busy += max(0.0, start + seconds - max(start, end))
        end = max(end, start + seconds)
    rows = [(name, int(launches), seconds) for name, (launches, seconds) in sums.items()]
    return sorted(rows, key=lambda item: -item[2]), busy


def _read_versions() -> dict[str, str]:
    """Return GPU and software, as `step_cases.table_row` takes them."""
    torch = importlib.import_module("torch")
    driver = Path("/proc/driver/nvidia/version")
    has_gpu = torch.cuda.is_available()
    return {
        "gpu": str(torch.cuda.get_device_name(0)) if has_gpu else "none", "cuda": str(torch.version.cuda),
        "driver": driver_version(driver.read_text()) if driver.exists() else "", "date": date.today().isoformat(),
        **{name: str(importlib.import_module(name).__version__).split("+")[0]
           for name in LIBRARIES},
    }  # fmt: skip


def _measure_cases(pipe: Connection, cases: Sequence[StepCase], device: str, tiny: bool) -> None:
    """Measure cases in a process of their own, once the other end of the pipe says so, and send each result."""
    torch = importlib.import_module("torch")
    importlib.import_module(MODELS[cases[0].model].library)
    pipe.recv()
    pipe.send(_read_versions())
    for case in cases:
        try:
            pipe.send(measure_step(case, device, tiny))
        except Exception as error:  # any failure is a row with its reason
            lines = str(error).splitlines() or [""]
            is_memory = isinstance(error, torch.cuda.OutOfMemoryError)
            reason = "out of memory" if is_memory else f"{type(error).__name__}: {lines[0][:300]}"
            pipe.send(({"failure": reason}, []))
        torch._dynamo.reset()
        gc.collect()


class _TableWriter:
    """The two tables of a run: steps and kernels, flushed with every case."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files = [(folder / name).open("x", newline="", encoding="utf-8") for name in ("steps.csv", "kernels.csv")]
        except OSError as error:
            raise CollectError(f"--output: {folder}: {error.strerror}; name a new folder") from None
        self.files = files
        self.steps = csv.DictWriter(files[0], (*COLUMNS, *MEASURED), lineterminator="\n")
        self.kernels = csv.writer(files[1], lineterminator="\n")
        self.steps.writeheader()
        self.kernels.writerow(KERNEL_COLUMNS)

    def write(
        self, case: StepCase, number: int, versions: Mapping[str, str], found: Values,
        kernels: Sequence[tuple[str, int, float]],
    ) -> None:  # fmt: skip
        """Append a case with its kernels."""
        cells = table_row(case, number, versions, found)
        self.steps.writerow(cells)
        for name, launches, seconds in kernels:
            self.kernels.writerow([cells["id"], str(case), name[:400], launches, f"{seconds:.6g}"])
        for file in self.files:
            file.flush()
        step_s, peak = cells["step_time_s_derived"], cells["peak_mem_gb_per_gpu"]
        print(f"{cells['id']} {case}: {cells['failure'] or f'{step_s} s, {peak} GiB'}", flush=True)


def _group_by_library(cases: Sequence[NumberedCase]) -> Iterator[list[NumberedCase]]:
    """Yield the cases of each process: neighbours whose models are of one library."""
    for _, group in groupby(cases, key=lambda item: MODELS[item[1].model].library):
        yield list(group)


@dataclass(frozen=True, slots=True)
class _MeasuringProcess:
    """Process that imports its libraries at once and measures its cases when it is told to."""

    process: Any
    pipe: Connection

    @classmethod
    def start(cls, group: Sequence[NumberedCase], device: str, tiny: bool) -> _MeasuringProcess:
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        process = spawn.Process(target=_measure_cases, args=(there, [case for _, case in group], device, tiny))
        process.start()
        there.close()
        return cls(process, here)

    def receive(self, limit_s: float) -> Any:
        """Return what the process sends next, or None if it ended or sends nothing for so long."""
        try:
            return self.pipe.recv() if self.pipe.poll(limit_s) else None
        except (EOFError, OSError):
            return None

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()


def collect_steps(cases: Sequence[NumberedCase], writer: _TableWriter, budget_s: float, device: str, tiny: bool) -> int:
    """Measure cases in order until they or the budget end, and return how many were written.

    Raises:
        CollectError: a process ended before its first case.
    """
    deadline, written = time.monotonic() + budget_s, 0
    waiting = deque(_group_by_library(cases))
    following = _MeasuringProcess.start(waiting[0], device, tiny) if waiting else None
    while waiting and following:
        group, running = deque(waiting.popleft()), following
        try:
            running.pipe.send("begin")
        except OSError:
            raise CollectError(f"PyTorch: {IMPORT_FAILED}") from None
        following = _MeasuringProcess.start(waiting[0], device, tiny) if waiting else None
        versions = running.receive(deadline - time.monotonic())
        if versions is None and time.monotonic() < deadline:
            raise CollectError(f"PyTorch: {IMPORT_FAILED}")
        while group and (left_s := deadline - time.monotonic()) > 0:
            answer = running.receive(min(CASE_LIMIT_S, left_s))
            if answer is None and time.monotonic() >= deadline:
                break
            found, kernels = answer or ({"failure": "the process ended, or took too long"}, [])
            number, case = group.popleft()
            writer.write(case, number, versions, found, kernels)
            written += 1
            if answer is None or "CUDA error" in found.get("failure", ""):
                break
        running.end()
        if following and (group or time.monotonic() >= deadline):
            following.end()
            following = None
        if time.monotonic() >= deadline:
            break
        if group:
            waiting.appendleft(list(group))
            following = _MeasuringProcess.start(waiting[0], device, tiny)
    return written


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = argparse.ArgumentParser(prog="collect steps", description="Measure training steps on one GPU.")
    parser.add_argument("-o", "--output", type=Path, default=Path("measured-steps"), help="new folder for the tables")
    parser.add_argument("--budget-minutes", type=float, default=30.0, help="stop after that long (default: 30)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose line in the plan has this text")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N cases")
    parser.add_argument("--dry-run", action="store_true", help="print the plan; needs neither PyTorch nor a GPU")
    parser.add_argument("--check", action="store_true", help="run tiny steps on the CPU; their times mean nothing")
    return parser


def main(given: Sequence[str]) -> int:
    """Run the command and return the exit status."""
    options = arguments().parse_args(given)
    cases = [(number, case) for number, case in enumerate(plan_steps()) if options.only in str(case)][options.skip :]
    if options.dry_run:
        print(*(f"S{number:03} {case}" for number, case in cases), f"{len(cases)} cases", sep="\n")
        return 0
    os.environ.setdefault("TEARDOWN_CUPTI", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        if not 0 < options.budget_minutes < math.inf:
            raise CollectError(f"--budget-minutes: {options.budget_minutes:g} measures nothing; give a positive number")
        if missing := [name for name in LIBRARIES if importlib.util.find_spec(name) is None]:
            raise CollectError(f"{missing[0]}: not installed; run this where {', '.join(LIBRARIES)} are")
        device = "cpu" if options.check else "cuda"
        if options.check:
            cases = [
                (number, replace(case, batch=min(case.batch, 2), sequence=min(case.sequence, 32)))
                for number, case in cases
            ]
        writer = _TableWriter(options.output)
        written = collect_steps(cases, writer, options.budget_minutes * 60, device, options.check)
        print(f"{written} of {len(cases)} cases", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    except CollectError as refusal:
        print(refusal, file=sys.stderr)
        return 2
    return 0
