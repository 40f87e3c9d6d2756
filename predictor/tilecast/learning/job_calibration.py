"""Correct the forecasts of a job on every GPU, GPU count and plan, from measured runs of the same job.

A deviation is the logarithm of forecast over measurement, where the forecast is already corrected by `calibration`. It
is a sum of independent deviations, which runs of one job share if they agree in:

* the job;
* the architecture of the GPU;
* the GPU, and ZeRO stage and recomputation of the plan ("recipe");
* the architecture, and how the plan splits the model ("split");
* the architecture, split, precision, sequence length and micro-batch, and so the shapes of kernels ("shape");
* everything ("setting").

One more deviation is that of the single run.

`calibration.toml` has the variances. The expected deviation of a setting is the best linear unbiased prediction c' K^-1
d (Henderson 1975; Robinson, Statistical Science 6, 1991). So a run changes only forecasts of its own job, and the more
settings agree, the larger the change. A few settings are odd: their "setting" deviation has a much larger variance. So
a small deviation is carried over to other settings almost whole, but only little of a very large one.

A run may report the time of its collectives or of its optimizer step. Then these parts of the step have deviations
apart from the rest of the step, and correct the corresponding parts of other plans.

`JobRuns.find_plan_factors` is the entry point. `part_deviations` and `correct_parts` deal with the parts of steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tilecast.shipped import NumbersFile
from tilecast.spec import Floats, Ints, Plan, Plans, Workload

MAX_RATIO = 3.0
"""Largest factor of a correction, up or down. A larger error means that another job ran."""
MAX_CHANGE_BY_OTHERS = 0.1
"""Largest relative change of a job's forecasts if all its runs are of other workloads with the job's name."""
LEVELS = ("job", "architecture", "recipe", "split", "shape", "setting")
"""Deviations that runs of one job can share, in the order of `find_shared_levels`."""
REST = "together"
SEPARATE_PARTS = ("communication", "optimizer")
"""Parts of a step that are corrected separately if a run reports them. All others are corrected together (`REST`)."""
LINK_KINDS = (False, True, None)
"""Kinds of plans: False for exchanges inside a node, True for exchanges across nodes, None for pipelines."""
MAX_EXPOSED_RATIO = 100.0
"""Like `MAX_RATIO`, for exposed communication, whose forecast may be close to zero."""
RECIPE_COLUMNS = ("zero_stage", "checkpointing")
"""Plan columns that determine what a GPU stores and what it recomputes."""
SPLIT_COLUMNS = (*RECIPE_COLUMNS, "tensor", "pipeline", "context", "expert", "expert_tensor")
"""Plan columns that determine how the model is split. The others determine the number of copies and their samples."""
Mask: TypeAlias = npt.NDArray[np.bool_]
ALL_COLUMNS = tuple(item.name for item in fields(Plans))
"""Every column of a plan."""


@dataclass(frozen=True, slots=True)
class RunSetting:
    """A GPU and the workload properties on which the deviation of a forecast may depend."""

    gpu: str
    architecture: str
    precision: str
    sequence_length: int
    global_batch: int

    @classmethod
    def from_workload(cls, gpu: str, architecture: str, workload: Workload) -> RunSetting:
        """Return the setting of a workload on a GPU of the given architecture."""
        return cls(gpu, architecture, workload.precision, workload.sequence_length, workload.global_batch)


@dataclass(frozen=True, slots=True)
class MeasuredParts:
    """Seconds of each part of a measured step. A part that the run does not report is None.

    Parts do not overlap. Forward and backward pass include the collectives that they wait for, unless `communication_s`
    is given.
    """

    input_s: float | None = None
    """Wait for the data loader."""
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    communication_s: float | None = None
    """Collectives that computation did not hide."""

    @property
    def values(self) -> tuple[float | None, ...]:
        """Seconds of all parts: input, forward, backward, optimizer, communication. An unreported part is None."""
        return self.input_s, self.forward_s, self.backward_s, self.optimizer_s, self.communication_s

    @property
    def sum_s(self) -> float:
        """Sum of the reported parts in seconds."""
        return sum(one or 0.0 for one in self.values)

    def scale_by(self, factor: float) -> MeasuredParts:
        """Return the parts with all seconds multiplied by a factor."""
        return MeasuredParts(*(None if one is None else one * factor for one in self.values))

    def blend_with(self, newer: MeasuredParts, weight: float) -> MeasuredParts:
        """Return the weighted mean of these parts and newer parts, where the newer parts have weight `weight`.

        A part that only one of the two has is taken unchanged.
        """
        both = zip(self.values, newer.values, strict=True)
        return MeasuredParts(
            *(new if old is None else old if new is None else old + weight * (new - old) for old, new in both)
        )

    @property
    def measured_parts_s(self) -> dict[str, float]:
        """Seconds of the communication and of the optimizer step, by name of the part, if the run reports them."""
        known = zip(SEPARATE_PARTS, (self.communication_s, self.optimizer_s), strict=True)
        return {name: value for name, value in known if value is not None}


NO_PARTS = MeasuredParts()
"""Parts of a run that reports only its step."""


@dataclass(frozen=True, slots=True)
class JobRun:
    """A measured run of a job: its setting, plan and deviations."""

    place: RunSetting  # names of fields are part of `inputs_hash`
    plan: Plan
    deviation: float
    """log(predicted / observed), where the job's own runs do not correct the prediction."""
    reports: int = 1
    """Number of reported step medians. The measurement is their median."""
    waited_s: float = 0.0
    """Seconds per step that the run waited for its data loader. A faster GPU does not shorten them."""
    parts: tuple[tuple[str, float], ...] = ()
    """Deviations of the reported parts and of the rest (`part_deviations`). Empty if the run reports none."""
    parts_elsewhere: tuple[tuple[str, float], ...] = ()
    """Like `parts`, but with communication in the rest."""
    gpus_per_node: int = 1
    fields: tuple[str, ...] = ALL_COLUMNS
    """Known columns of the run's plan. All plans count as equal in the others."""
    is_relative: bool = False
    """Whether the run is of another workload with the job's name. Then deviations of its plan and shape are ignored."""

    def list_deviations(self, is_across: bool | None) -> tuple[float, ...]:
        """Return the deviations (rest of the step, communication, optimizer) that apply to plans of one kind.

        A part that the run does not report gets the deviation of the rest. So does communication if the run used links
        of another kind.

        Args:
            is_across: kind of the plans, one of `LINK_KINDS`.
        """
        is_same_kind = is_across == (self.plan.gpus > self.gpus_per_node)
        parts = dict(self.parts if is_same_kind else self.parts_elsewhere)
        rest = parts.get(REST, self.deviation)
        return rest, *(parts.get(name, rest) for name in SEPARATE_PARTS)


def part_deviations(
    expected_s: Mapping[str, float], exchanged_s: float, spent_s: float, measured_parts_s: Mapping[str, float]
) -> tuple[tuple[str, float], ...]:
    """Return (name, log(forecast / measurement)) for each measured part of a step and for the rest of the step.

    With these deviations, `correct_parts` turns the forecast into the measured step. For communication, the forecast
    time of all collectives is added to numerator and denominator, so that the ratio stays finite.

    Args:
        expected_s: forecast seconds of all parts, by name.
        exchanged_s: forecast seconds of all collectives, including those that computation hides.
        spent_s: seconds of the measured step.
        measured_parts_s: measured seconds of some of `SEPARATE_PARTS`, by name. Their sum is less than `spent_s`, and
            their forecasts are above 0.
    """
    rest_s = sum(expected_s.values()) - sum(expected_s[name] for name in measured_parts_s)
    rest = rest_s / (spent_s - sum(measured_parts_s.values()))
    known = {REST: math.log(rest)}
    for name, seconds in measured_parts_s.items():
        beside = exchanged_s if name == "communication" else 0.0
        known[name] = math.log((expected_s[name] + beside) / (seconds + beside / rest))
    return tuple(known.items())


def correct_parts(parts_s: Mapping[str, Floats], hidden_s: Floats, ratios: Floats) -> dict[str, Floats]:
    """Return the corrected seconds of the parts of n steps, (n,) each, by name.

    No step changes by more than the factor `MAX_RATIO`, up or down.

    Args:
        parts_s: forecast seconds of the parts, by name, (n,) each.
        hidden_s: seconds of collectives that computation hides, (n,).
        ratios: factors on the rest, communication and optimizer from `JobRuns.find_plan_factors`, (3, n).
    """
    rest, exposed, update = ratios
    parts = {name: value * rest for name, value in parts_s.items()}
    exchanged = parts_s["communication"] + hidden_s
    gained = parts_s["communication"] * exposed + exchanged * (exposed - rest)
    parts |= {"communication": np.maximum(gained, 0.0), "optimizer": parts_s["optimizer"] * update}
    step_s, before = (np.sum(list(one.values()), axis=0) for one in (parts, parts_s))
    within = np.clip(step_s / before, 1 / MAX_RATIO, MAX_RATIO) * before / step_s
    return {name: value * within for name, value in parts.items()}


def find_shared_levels(run: JobRun, setting: RunSetting, plans: Plans) -> Mask:
    """Return at which of the 6 `LEVELS` a run agrees with each of n plans in a setting, a mask (6, n)."""
    of_run, run_plan = run.place, Plans.from_plans(run.plan)
    kernels = (of_run.precision, of_run.sequence_length) == (setting.precision, setting.sequence_length)
    architecture = of_run.architecture == setting.architecture
    every = np.ones(len(plans), dtype=bool)
    same = {
        name: every if name not in run.fields else getattr(plans, name) == getattr(run_plan, name)
        for name in ALL_COLUMNS
    }
    recipe = np.all([same[name] for name in RECIPE_COLUMNS], axis=0)
    split = architecture & np.all([same[name] for name in SPLIT_COLUMNS], axis=0)
    whole = np.all(list(same.values()), axis=0) & (plans.gpus == run_plan.gpus)
    return np.stack(
        [
            every,
            every & architecture,
            recipe & (of_run.gpu == setting.gpu),
            split,
            split & kernels & same["micro_batch"],
            whole & (of_run == setting),
        ]
    )


@cache
def shipped_deviations() -> Mapping[str, float]:
    """Return the standard deviations for runs of one job from `calibration.toml`, by level name.

    The mapping also has `run` and `report`, `odd` for odd settings, the fraction `odd_share` of odd settings, and the
    exponent `narrowing` of ranges.
    """
    keys = (*LEVELS, "run", "report", "odd", "odd_share", "narrowing")
    table = NumbersFile.read_shipped("tilecast.learning", "calibration.toml").read_values("job", keys)
    return {name: float(value) for name, value in table.items()}


@dataclass(frozen=True, slots=True)
class JobRuns:
    """Measured runs of one job, from which its forecasts are corrected. Without runs, forecasts do not change."""

    runs: tuple[JobRun, ...] = ()

    def find_plan_factors(
        self, setting: RunSetting, plans: Plans, gpus_per_node: int, sigmas: Mapping[str, float] | None = None
    ) -> tuple[Floats, Floats]:
        """Return the factors on parts of the steps of n plans, (3, n), and on the half-widths of their ranges, (n,).

        Row 0 is for the rest of the step, row 1 for communication, and row 2 for the optimizer.

        Args:
            setting: the GPU and the properties of the workload.
            plans: the plans, (n,).
            gpus_per_node: GPUs per node of the pool.
            sigmas: standard deviations by level. None for `shipped_deviations()`.
        """
        if not self.runs:
            return np.ones((1 + len(SEPARATE_PARTS), len(plans))), np.ones(len(plans))
        run_plans = Plans.from_plans(*(one.plan for one in self.runs))
        mutual = np.stack(
            [self._find_shared_levels(one.place, run_plans.take(np.array([k]))) for k, one in enumerate(self.runs)],
            axis=-1,
        )
        reports = np.array([one.reports for one in self.runs])
        shared = self._find_shared_levels(setting, plans)
        of_job = [name in ("job", "architecture") for name in LEVELS]
        relative = np.array([one.is_relative for one in self.runs])
        shared &= np.array(of_job)[:, None, None] | ~relative[:, None]
        deviation, most = np.array([[one.deviation for one in self.runs]]), np.array([[MAX_RATIO]])
        deviation_for_odds = deviation
        if any(one.parts for one in self.runs):
            links = [[one.list_deviations(is_across) for one in self.runs] for is_across in LINK_KINDS]
            of_parts = np.array(links).swapaxes(-1, -2)
            deviation = of_parts.reshape(-1, len(self.runs))
            # A part such as a wait may be many times its forecast. The rest tells whether a setting is odd.
            deviation_for_odds = np.broadcast_to(of_parts[:, :1], of_parts.shape).reshape(deviation.shape)
            most = np.tile([[MAX_RATIO], [MAX_EXPOSED_RATIO], [MAX_RATIO]], (len(LINK_KINDS), 1))
        known = sigmas or shipped_deviations()
        ratio, width = estimate_correction_factors(
            known, mutual[:, :, 0], shared, deviation, reports, deviation_for_odds
        )
        most = np.minimum(most, 1 + MAX_CHANGE_BY_OTHERS) if relative.all() else most
        shape = (len(LINK_KINDS), 1 + len(SEPARATE_PARTS), len(plans))
        ratios = np.broadcast_to(np.clip(ratio, 1 / most, most), (shape[0] * shape[1], shape[2])).reshape(shape)
        inside, across, pipelines = ratios
        return np.where(plans.pipeline > 1, pipelines, np.where(plans.gpus > gpus_per_node, across, inside)), width

    def estimate_input_waits_s(self, plans: Plans, gpus_per_node: int) -> Floats:
        """Return the seconds per step that n plans wait for the data loader, (n,).

        The wait is proportional to the samples that a node loads, at the mean rate of the runs.
        """
        each = [
            one.waited_s / count_samples_per_node(Plans.from_plans(one.plan), one.gpus_per_node)[0] for one in self.runs
        ]
        return float(np.mean(each)) * count_samples_per_node(plans, gpus_per_node)

    def _find_shared_levels(self, setting: RunSetting, plans: Plans) -> Mask:
        """Return at which of the 6 `LEVELS` each of k runs agrees with each of n plans at a setting, (6, k, n)."""
        return np.stack([find_shared_levels(one, setting, plans) for one in self.runs], axis=1)


def count_samples_per_node(plans: Plans, gpus_per_node: int) -> Floats:
    """Return the samples that each node loads per step, for n plans, (n,)."""
    samples = plans.data * plans.micro_batch * plans.gradient_accumulation
    return np.asarray(samples / np.ceil(plans.gpus / gpus_per_node))


def estimate_correction_factors(
    sigmas: Mapping[str, float],
    shared_by_runs: Mask,
    shared: Mask,
    deviation: Floats,
    reports: Ints,
    deviation_for_odds: Floats | None = None,
) -> tuple[Floats, Floats]:
    """Return the factors on n forecast steps and on the half-widths of their ranges, (…, n) each.

    Leading axes are different jobs. The prediction is a mixture of one for usual and one for odd settings, weighted by
    the likelihood of the runs. Ranges use the mean variance, so they do not depend on measurements. The factors are not
    limited here.

    Args:
        sigmas: standard deviations as in `shipped_deviations`.
        shared_by_runs: at which of `LEVELS` the runs agree with each other, (6, …, k, k).
        shared: at which of `LEVELS` the runs agree with the settings to correct, (6, …, k, n).
        deviation: deviations of the runs, (…, k).
        reports: number of reports of the runs, (…, k).
        deviation_for_odds: deviations that determine whether settings are odd, (…, k). None for `deviation`.
    """
    deviation_for_odds = deviation if deviation_for_odds is None else deviation_for_odds
    noise = (sigmas["run"] ** 2 + sigmas["report"] ** 2 / reports)[..., None] * np.eye(deviation.shape[-1])
    odd_share = sigmas["odd_share"]
    variances = {own: np.array([sigmas[name] ** 2 for name in (*LEVELS[:-1], own)]) for own in (LEVELS[-1], "odd")}
    odds, expected = [], []
    for variance, share in zip(variances.values(), (1 - odd_share, odd_share), strict=True):
        covariance, target = (np.tensordot(variance, one, 1) for one in (shared_by_runs, shared))
        weighed, told = (
            np.linalg.solve(covariance + noise, one[..., None])[..., 0] for one in (deviation, deviation_for_odds)
        )
        odds.append(
            np.log(share) - 0.5 * ((deviation_for_odds * told).sum(-1) + np.linalg.slogdet(covariance + noise)[1])
        )
        expected.append((weighed[..., None] * target).sum(-2))
    odd = 1 / (1 + np.exp(np.clip(odds[0] - odds[1], -50, 50)))[..., None]
    mean = (1 - odd) * expected[0] + odd * expected[1]
    variance = (1 - odd_share) * variances[LEVELS[-1]] + odd_share * variances["odd"]
    covariance, target = (np.tensordot(variance, one, 1) for one in (shared_by_runs, shared))
    explained = (target * np.linalg.solve(covariance + noise, target)).sum(-2) / (variance.sum() + sigmas["run"] ** 2)
    left = 1.0 - np.clip(explained, 0.0, 1.0)
    return np.exp(-mean), np.asarray(left ** sigmas["narrowing"])
