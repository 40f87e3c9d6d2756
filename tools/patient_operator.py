"""The operator with another clock, longer waits and statements that run first, as tests want it.

Arguments: SKEW_S PATIENCE PRELUDE, then those of kopf's command line.
"""

from __future__ import annotations

import runpy
import sys
import time
from dataclasses import replace
from functools import partial

from tilecast_operator import assembly
from tilecast_operator.timings import ControllerDelays


def run_operator(skew_s: float, patience: float, prelude: str) -> None:
    """Run kopf with the arguments of this process.

    Args:
        skew_s: how far the clock is ahead, in seconds.
        patience: factor on the times to decide about a waiting job and to wait for the plan of the queue.
        prelude: Python statements that run before the operator.
    """
    exec(prelude, {})  # noqa: S102 -- the statements are those of a test of this repository
    if skew_s:
        true_time = time.time
        time.time = lambda: true_time() + skew_s
    usual = ControllerDelays()
    longer = replace(usual, decide_s=usual.decide_s * patience, plan_s=usual.plan_s * patience)
    assembly.OperatorParts = partial(assembly.OperatorParts, timings=longer)  # type: ignore[misc, assignment]
    runpy.run_module("kopf", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run_operator(float(sys.argv.pop(1)), float(sys.argv.pop(1)), sys.argv.pop(1))
