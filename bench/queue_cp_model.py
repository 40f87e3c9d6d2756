"""Model of a queue with counts free in CP-SAT: reads a queue as JSON and writes what CP-SAT chooses.

`queue_cp_sat.py` runs it in a process of its own, since highspy and ortools cannot be loaded together: both bring a
HiGHS library of one name. It needs `pip install ortools`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ortools.sat.python import cp_model


def choose(queue: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option and the start of every job, and the bound of the weighted sum of their ends.

    Args:
        queue: lists over options (`job`, `pool`, `gpus`, `seconds` in whole units of time), lists over jobs (`weight`,
            and of a plan with which CP-SAT begins `option` and `start`), `room` by pool, the latest end `end`, whether
            jobs start in Kueue's order (`ordered`), and the `limit` in units of deterministic time.
    """
    jobs, gpus, seconds = len(queue["weight"]), queue["gpus"], queue["seconds"]
    options = [[item for item, job in enumerate(queue["job"]) if job == one] for one in range(jobs)]
    model = cp_model.CpModel()
    chosen = [model.new_bool_var(f"chosen{item}") for item in range(len(gpus))]
    starts = [model.new_int_var(0, queue["end"], f"start{job}") for job in range(jobs)]
    ends = [model.new_int_var(0, queue["end"], f"end{job}") for job in range(jobs)]
    on = dict[int, cp_model.IntervalVar]()
    for job, items in enumerate(options):
        model.add_exactly_one(chosen[item] for item in items)
        model.add_hint(starts[job], queue["start"][job])
        model.add_hint(ends[job], queue["start"][job] + seconds[queue["option"][job]])
        for item in items:
            model.add_hint(chosen[item], queue["option"][job] == item)
            on[item] = model.new_optional_interval_var(starts[job], seconds[item], ends[job], chosen[item], f"on{item}")
    for pool, room in enumerate(queue["room"]):
        here = [item for item in on if queue["pool"][item] == pool]
        model.add_cumulative([on[item] for item in here], [gpus[item] for item in here], room)
    if queue["ordered"]:
        _keep_kueue_order(model, queue, options, chosen, starts)
    model.minimize(sum(weight * end for weight, end in zip(queue["weight"], ends, strict=True)))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = queue["limit"]
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return {"option": queue["option"], "start": queue["start"], "bound": solver.best_objective_bound}
    option = [next(item for item in items if solver.value(chosen[item])) for items in options]
    return {
        "option": option,
        "start": [solver.value(start) for start in starts],
        "bound": solver.best_objective_bound,
        "status": solver.status_name(status),
    }


def _keep_kueue_order(
    model: cp_model.CpModel,
    queue: Mapping[str, Any],
    options: Sequence[Sequence[int]],
    chosen: Sequence[cp_model.IntVar],
    starts: Sequence[cp_model.IntVar],
) -> None:
    """Require that a job starts no earlier than a job before it that takes as many GPUs of its pool, or fewer."""
    for late in range(len(starts)):
        for early in range(late):
            for pool in range(len(queue["room"])):
                here = [item for item in options[early] if queue["pool"][item] == pool]
                there = [item for item in options[late] if queue["pool"][item] == pool]
                if not here or not there:
                    continue
                is_before = model.new_bool_var(f"before{early},{late},{pool}")
                model.add(starts[early] <= starts[late]).only_enforce_if(is_before)
                model.add_hint(is_before, queue["start"][early] <= queue["start"][late])
                for item in here:
                    larger = [chosen[other] for other in there if queue["gpus"][other] >= queue["gpus"][item]]
                    if larger:
                        model.add(is_before + 1 >= chosen[item] + sum(larger))


if __name__ == "__main__":
    json.dump(choose(json.load(sys.stdin)), sys.stdout)
