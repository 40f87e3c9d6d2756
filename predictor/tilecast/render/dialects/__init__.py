"""Write the ranked pools of an advice in the words of a scheduler, so that it can run the job on one of them.

Each dialect has a module with a function `write_…(advice)`, which returns text that the scheduler's own tools read.
Comments at its top name the pools, best first, with the plan and the step of each, and what to fill in. What a pool
does not say, such as a partition of Slurm, is not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from tilecast.advice import Advice
from tilecast.spec import SpecError


@dataclass(frozen=True, slots=True)
class Dialect:
    """A scheduler's way to say "one of these"."""

    purpose: str
    function: str
    """Function that writes it, in the module with the dialect's name, which is imported when it is needed."""


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
    """Return an advice in a dialect of `DIALECTS`. Without any pool that can run the job, return only comments.

    Raises:
        SpecError: there is no dialect with this name.
    """
    if name not in DIALECTS:
        raise SpecError("dialect", f"{name!r} is not known", f"known: {', '.join(DIALECTS)}")
    module = import_module(f"tilecast.render.dialects.{name}")
    return str(getattr(module, DIALECTS[name].function)(advice))
