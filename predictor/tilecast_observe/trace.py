"""Measure exposed communication in a trace of `torch.profiler`.

    python trace.py TRACE.json

prints the share of the profiled steps in which only NCCL kernels ran. `StepTimer` runs this file as a separate process.
A trace may have hundreds of megabytes, and parsing it would delay the training thread.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of events that run on the GPU."""
STEP = "ProfilerStep#"
"""Prefix of the names that the profiler gives to the steps of its schedule."""


def exposed_share(trace: Mapping[str, Any]) -> float | None:
    """Return the share of the profiled steps in which only NCCL kernels ran, or None if the trace has no step.

    Args:
        trace: the document that `export_chrome_trace` writes: complete events ("X") with category, name, begin and
            duration.
    """
    steps_us, edges = 0.0, list[tuple[float, int, int]]()
    for event in trace.get("traceEvents", ()):
        if event.get("ph") != "X":
            continue
        name, begin, length = str(event.get("name", "")), float(event["ts"]), float(event.get("dur", 0.0))
        if event.get("cat") == "user_annotation" and name.startswith(STEP):
            steps_us += length
        elif event.get("cat") in ON_GPU:
            is_nccl = name.lower().startswith("nccl")
            edges += [(begin, is_nccl, not is_nccl), (begin + length, -is_nccl, -(not is_nccl))]
    if steps_us <= 0:
        return None
    alone_us, before_us, nccl, others = 0.0, 0.0, 0, 0
    for at_us, more_nccl, more_others in sorted(edges):
        if nccl and not others:
            alone_us += at_us - before_us
        before_us, nccl, others = at_us, nccl + more_nccl, others + more_others
    return min(alone_us / steps_us, 1.0)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(exposed_share(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
