"""Write the ranked pools of an advice in a scheduler's format, so that the scheduler can run the job on one of them.

Each dialect has a module with a function `write_…(advice)`. The function returns text that the scheduler's own tools
read. Comments at the top list the pools, best first, each with its plan and step time. They also say what the user must
fill in: values that a pool does not have, such as a Slurm partition, are not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from tilecast.advice import Advice
from tilecast.spec import SpecError


@dataclass(frozen=True, slots=True)
class Dialect:
    """A format of a scheduler that lists several pools, of which the scheduler chooses one."""

    purpose: str
    function: str
    """Name of the function that writes it, in the module of the same name as the dialect. It is imported on demand."""


DIALECTS: Mapping[str, Dialect] = {
    "dra": Dialect("a ResourceClaimTemplate with firstAvailable, for Kubernetes 1.34 or later", "write_claim"),
    "kueue": Dialect("ResourceFlavors and a ClusterQueue, best flavor first", "write_queue"),
    "karpenter": Dialect("NodePools with weights", "write_node_pools"),
    "ray": Dialect("a label selector with a fallback strategy", "write_options"),
    "skypilot": Dialect("a task with resources.ordered", "write_task"),
    "slurm": Dialect("sbatch lines, of which the first to start cancels the others", "write_submissions"),
}
"""Dialects by their name in `-o`."""


def write_dialect(name: str, advice: Advice) -> str:
    """Return an advice in a dialect of `DIALECTS`. If no pool can run the job, return only comments.

    Raises:
        SpecError: there is no dialect with this name.
    """
    if name not in DIALECTS:
        raise SpecError("dialect", f"{name!r} is not known", f"known: {', '.join(DIALECTS)}")
    module = import_module(f"tilecast.render.dialects.{name}")
    return str(getattr(module, DIALECTS[name].function)(advice))
