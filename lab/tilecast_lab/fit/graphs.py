"""Tracing of the models of a runs table, by their names in timm, into graphs as `tilecast trace` writes them.

Every model is traced in a process of its own with limits of time and memory, so that one failure does not affect the
others. Needs timm and torch: the extra `vision`.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilecast.spec import SpecError
from tilecast.validate.runs import read_table
from tilecast.zoo.traced import document, torch_build, torch_export
from tilecast_lab.validate.graphs import GraphName, graph_of

LONGEST_REASON = 4000
"""Largest message of a process in bytes; it must fit into a pipe that is not read yet."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m tilecast_lab graphs` to a parser."""
    parser.add_argument("tables", nargs="+", type=Path, metavar="RUNS.csv")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="a graph that is there stays")
    parser.add_argument("--seconds", type=float, default=600.0, help="of each process, by the clock")
    parser.add_argument("--memory-gib", type=float, default=16.0, help="that each process may take beside torch")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")


def run(options: argparse.Namespace) -> int:
    """Trace models without a graph, print one line per failed model and the number of graphs, and return 0."""
    rows = [row for path in options.tables for row in read_table(path)]
    models = sorted({graph for row in rows if (graph := graph_of(row)) is not None}, key=lambda one: one.file)
    options.output.mkdir(parents=True, exist_ok=True)
    failed = trace_all(models, options.output, options.seconds, int(options.memory_gib * 2**30), options.jobs)
    for model, reason in failed.items():
        print(f"{model.file}: {reason}", file=sys.stderr)
    print(f"{len(models) - len(failed)} of {len(models)} models have a graph in {options.output}")
    return 0


def trace_all(
    models: Sequence[GraphName], folder: Path, seconds: float, memory_bytes: int, jobs: int = 1
) -> dict[GraphName, str]:
    """Trace every model whose graph is not in the folder, and return the reasons of those that failed.

    Raises:
        SpecError: torch or timm is missing.
    """
    try:
        import timm  # noqa: F401  (imported once, before the processes part)
        import torch
    except ImportError as error:
        raise SpecError("graphs", f"needs {error.name}", "run `pip install 'tilecast[vision]'`") from None
    torch.set_num_threads(1)
    # The first trace imports more modules; do so once, before the processes are forked.
    torch_export.trace_built_model(lambda: (torch.nn.Linear(2, 2), (torch.zeros(2, 2),)), "linear")
    waiting = [model for model in models if not (folder / model.file).exists()][::-1]
    running: list[_Child] = []
    reasons: dict[GraphName, str] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_Child.start(waiting.pop(), folder, seconds, memory_bytes))
        for child in [child for child in running if child.is_over()]:
            running.remove(child)
            if reason := child.reason():
                reasons[child.model] = reason
        time.sleep(0.02)
    return reasons


@dataclass(slots=True)
class _Child:
    """Process that traces one model, with the read end of a pipe for the reason of its failure."""

    model: GraphName
    process: int
    pipe: int
    seconds: float
    started_s: float
    status: int | None = None
    is_late: bool = False

    @classmethod
    def start(cls, model: GraphName, folder: Path, seconds: float, memory_bytes: int) -> _Child:
        """Fork a process that traces a model into `folder`."""
        sys.stdout.flush()
        pipe, writer = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                os.close(pipe)
                os.write(writer, _traced(model, folder, memory_bytes).encode()[:LONGEST_REASON])
            finally:
                os._exit(0)
        os.close(writer)
        return cls(model, process, pipe, seconds, time.monotonic())

    def is_over(self) -> bool:
        """Return whether the process has ended; kill it once it runs longer than `seconds`."""
        if not self.is_late and time.monotonic() > self.started_s + self.seconds:
            os.kill(self.process, signal.SIGKILL)
            self.is_late = True
        done, status = os.waitpid(self.process, os.WNOHANG)
        if done:
            self.status = status
        return bool(done)

    def reason(self) -> str:
        """Return why there is no graph, or empty text if there is one; call it once, after the process has ended."""
        with os.fdopen(self.pipe, encoding="utf-8", errors="replace") as pipe:
            text = pipe.read()
        if self.is_late:
            return f"took more than {self.seconds:g} s"
        if self.status is not None and os.WIFSIGNALED(self.status):
            return f"its process died of signal {os.WTERMSIG(self.status)}"
        return text


def _traced(model: GraphName, folder: Path, memory_bytes: int) -> str:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        text = document.write(torch_export.trace(f"{torch_build.TIMM}{model.file.removesuffix('.json')}"))
    except SpecError as error:
        return str(error)
    except MemoryError:
        return "took more memory than it may"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()[:200]}"
    partial_file = folder / f"{model.file}.part"
    partial_file.write_text(text, encoding="utf-8")
    partial_file.rename(folder / model.file)
    return ""
