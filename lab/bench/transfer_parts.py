"""Value of a run's separately measured communication for corrections.

python lab/bench/transfer_parts.py RUNS.csv ...

No published table reports parts. The additional time of a run on several GPUs over its twin on one of them (same model,
shard, micro-batch and recomputation) is taken as the time of the collectives that nothing hid. Runs of the same model
elsewhere are forecast with constants fitted without their source, and corrected by that run, once by its step alone and
once with the part. An error is the mean over a split group, then over groups. The part has the noise of two runs; a
measured part has not.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tilecast.learning.job_calibration import JobRun, JobRuns, correct_parts, part_deviations
from tilecast.spec import Plans
from tilecast.validate.transfer import KINDS, TransferRuns
from tilecast_lab.validate import transfer
from tilecast_lab.validate.calibration import published_forecasts

TITLES = ("raw", "by the step", "by its parts")
SHARD = ("tensor", "pipeline", "context", "expert", "micro_batch", "gradient_accumulation", "checkpointing")


class PairedRows:
    """Rows with the forecast parts of their steps, from constants fitted without the row's source."""

    def __init__(self, subjects: TransferRuns) -> None:
        self.subjects = subjects
        self.measured = subjects.observed_s
        self.nodes = [case.pool.gpus_per_node for case in subjects.measured.cases]
        self.parts, self.hidden = list[dict[str, float]](), list[float]()
        for item, run in zip(published_forecasts(subjects.measured), subjects.measured.runs, strict=True):
            parts = item.parts or {}
            left_out = run.predicted_s / sum(parts.values())
            self.parts.append({name: part * left_out for name, part in parts.items()})
            self.hidden.append((item.hidden_s or 0.0) * left_out)

    def pairs(self) -> Iterator[tuple[int, int, list[int]]]:
        """Yield a row on one GPU, its twin on several, and the model's other rows on several GPUs."""
        alike = defaultdict[tuple[str, ...], list[int]](list)
        for index, model in enumerate(self.subjects.model):
            alike[model].append(index)
        for members in alike.values():
            several = [index for index in members if self.subjects.plans[index].gpus > 1]
            for one in members:
                for twin in several:
                    if self.subjects.plans[one].gpus == 1 and self._cell(one) == self._cell(twin):
                        yield one, twin, [index for index in several if index != twin]

    def errors(self, one: int, twin: int, asked: int) -> list[float]:
        """Return the relative errors of a row's forecast, in the order of `TITLES`."""
        steps = [sum(self.parts[asked].values())]
        for apart in (False, True):
            known = self._apart(one, twin) if apart else {}
            exchanged_s = self.parts[twin]["communication"] + self.hidden[twin]
            parts = part_deviations(self.parts[twin], exchanged_s, self.measured[twin], known) if known else ()
            deviation = float(self.subjects.deviation[twin])
            place, plan, node = self.subjects.places[twin], self.subjects.plans[twin], self.nodes[twin]
            own = JobRuns((JobRun(place, plan, deviation, parts=parts, gpus_per_node=node),))
            plans = Plans.from_plans(self.subjects.plans[asked])
            ratios, _ = own.find_plan_factors(self.subjects.places[asked], plans, self.nodes[asked])
            column = {name: np.array([part]) for name, part in self.parts[asked].items()}
            after = correct_parts(column, np.array([self.hidden[asked]]), ratios)
            steps.append(float(sum(part[0] for part in after.values())))
        return [abs(step / self.measured[asked] - 1) for step in steps]

    def _apart(self, one: int, twin: int) -> dict[str, float]:
        """Return the twin's communication: its additional time over the other row, both without their updates."""
        alone, several = (
            sum(self.parts[row].values()) - self.parts[row]["communication"] - self.parts[row]["optimizer"]
            for row in (one, twin)
        )
        computed = (self.measured[one] - self.parts[one]["optimizer"]) * several / alone
        if self.subjects.plans[twin].pipeline > 1 or self.parts[twin]["communication"] + self.hidden[twin] <= 0:
            return {}
        return {"communication": max(self.measured[twin] - self.parts[twin]["optimizer"] - computed, 0.0)}

    def _cell(self, row: int) -> tuple[object, ...]:
        plan = self.subjects.plans[row]
        return self.subjects.places[row].gpu, *(getattr(plan, name) for name in SHARD)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    twins = PairedRows(transfer.read_subjects(parser.parse_args().files))
    errors = defaultdict[tuple[str, str], list[list[float]]](list)
    for one, twin, others in twins.pairs():
        for asked in others:
            kind = twins.subjects.find_pair_kind(twin, asked)
            if kind is not None:
                errors[kind, twins.subjects.group[asked]].append(twins.errors(one, twin, asked))
    print(f"{'':<14}{'groups':>7}{'forecasts':>11}" + "".join(f"{title:>14}" for title in TITLES))
    for kind in KINDS:
        groups = [np.array(rows) for (name, _), rows in errors.items() if name == kind]
        means = np.mean([rows.mean(axis=0) for rows in groups], axis=0) if groups else [np.nan] * 3
        count = sum(len(rows) for rows in groups)
        print(f"{kind:<14}{len(groups):>7}{count:>11}" + "".join(f"{mean:14.2%}" for mean in means))
