"""Correct the forecasts of a job on every GPU, count and plan from measured runs of the same job.

A deviation is the logarithm of raw forecast over measurement, without the part that the cluster's other runs explain
(`calibration`). It is a sum of parts that runs of one job share:

* one of the job, wherever it runs;
* one of the GPU's architecture;
* one of the recipe on one GPU: the ZeRO stage and the recomputation of its plan;
* one of the split of the model by its plan, on one architecture;
* one of the shape of its kernels: that split, precision, sequence length and micro-batch, on one architecture;
* one of exactly the same setting;
* and one of the run alone.

`calibration.toml` has the variance of each part. The expected deviation of a setting is the best linear unbiased
prediction c' K^-1 d (Henderson 1975; Robinson, Statistical Science 6, 1991). So a run moves all forecasts of its own
job, by as much as the two settings share, and no forecasts of other jobs. A few settings are odd: their own part has a
much larger variance. So a small deviation is carried over almost whole, and of a very large one little is.

A run may report the time of its collectives or its update. Then each of them has a separate deviation, and the rest of
the step has another. The wait for links is carried over to the exchanges of other plans, and the time of the update to
their updates.

`JobRuns.factors_of_plans` is the entry point. `part_deviations` and `correct_parts` deal with the parts of steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tilecast.shipped import FactFile
from tilecast.spec import Floats, Ints, Plan, Plans, Workload

MAX_RATIO = 3.0
"""Largest factor of a correction, up or down; a larger error means that another job ran."""
MAX_CHANGE_BY_OTHERS = 0.1
"""Largest relative change of a job's forecasts where all its runs are of other workloads under the job's name."""
LEVELS = ("job", "architecture", "recipe", "split", "shape", "setting")
"""Deviations that runs of one job share, in the order of `shared_levels`."""
REST = "together"
SEPARATE_PARTS = ("communication", "optimizer")
"""Parts of a step that are corrected alone if a run reports them; all others are corrected together (`REST`)."""
LINK_KINDS = (False, True, None)
"""Kinds of plans: False for exchanges inside a node, True for exchanges across nodes, None for pipelines."""
MAX_EXPOSED_RATIO = 100.0
"""Value of `MAX_RATIO` for the ratio of exposed communication, whose forecast may be close to zero."""
RECIPE_COLUMNS = ("zero_stage", "checkpointing")
"""Columns of a plan that tell what its GPUs hold and what they compute twice."""
SPLIT_COLUMNS = (*RECIPE_COLUMNS, "tensor", "pipeline", "context", "expert")
"""Columns of a plan that tell how it splits the model; the others tell the number of copies and their samples."""
Mask: TypeAlias = npt.NDArray[np.bool_]
ALL_COLUMNS = tuple(item.name for item in fields(Plans))
"""Every column of a plan."""


@dataclass(frozen=True, slots=True)
class RunSetting:
    """A GPU and the properties of a workload there that deviations of its forecast may depend on."""

    gpu: str
    architecture: str
    precision: str
    sequence_length: int
    global_batch: int

    @classmethod
    def from_workload(cls, gpu: str, architecture: str, workload: Workload) -> RunSetting:
        """Return the setting of a workload on a GPU."""
        return cls(gpu, architecture, workload.precision, workload.sequence_length, workload.global_batch)


@dataclass(frozen=True, slots=True)
class MeasuredParts:
    """Seconds of the parts of a measured step, None for a part that its run does not report.

    Parts do not overlap. A pass includes the collectives that it waits for, unless they are reported as communication.
    """

    input_s: float | None = None
    """Waiting for the data loader."""
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    communication_s: float | None = None
    """Collectives that computation did not hide."""

    @property
    def values(self) -> tuple[float | None, ...]:
        """All parts, in order."""
        return self.input_s, self.forward_s, self.backward_s, self.optimizer_s, self.communication_s

    @property
    def sum_s(self) -> float:
        """Sum of the reported parts."""
        return sum(one or 0.0 for one in self.values)

    def scale_by(self, factor: float) -> MeasuredParts:
        """Return the parts of a step that is `factor` times as long."""
        return MeasuredParts(*(None if one is None else one * factor for one in self.values))

    def blend_with(self, newer: MeasuredParts, weight: float) -> MeasuredParts:
        """Return these parts moved towards newer ones by a weight.

        A part that only one of the two reports keeps the reported value.
        """
        both = zip(self.values, newer.values, strict=True)
        return MeasuredParts(
            *(new if old is None else old if new is None else old + weight * (new - old) for old, new in both)
        )

    @property
    def measured_parts_s(self) -> dict[str, float]:
        """Reported parts that `SEPARATE_PARTS` lists."""
        known = zip(SEPARATE_PARTS, (self.communication_s, self.optimizer_s), strict=True)
        return {name: value for name, value in known if value is not None}


NO_PARTS = MeasuredParts()
"""Parts of a run that reports only its step."""


@dataclass(frozen=True, slots=True)
class JobRun:
    """A measured run of the job."""

    place: RunSetting  # names of fields are part of `inputs_hash`
    plan: Plan
    deviation: float
    """log(predicted / observed), for the forecast without the job's own runs."""
    reports: int = 1
    """Number of medians of steps whose median is the measurement."""
    waited_s: float = 0.0
    """Seconds of a step that the run waited for its data loader, which no other GPU shortens."""
    parts: tuple[tuple[str, float], ...] = ()
    """Deviations of the reported parts and of the rest (`part_deviations`); empty if the run reports none."""
    parts_elsewhere: tuple[tuple[str, float], ...] = ()
    """Value of `parts` with communication as a part of the rest."""
    gpus_per_node: int = 1
    fields: tuple[str, ...] = ALL_COLUMNS
    """Columns of its plan that are known. In the others, every plan counts as equal."""
    is_relative: bool = False
    """Whether it is of another workload under the job's name; then deviations of its plan and shape are ignored."""

    def deviations_of_parts(self, is_across: bool | None) -> tuple[float, ...]:
        """Return the deviations of the parts corrected together and of each of `SEPARATE_PARTS`, for one kind of plans.

        `is_across` is one of `LINK_KINDS`. A part that is not reported deviates like the rest, and so does the wait for
        links of another kind.
        """
        is_same_kind = is_across == (self.plan.gpus > self.gpus_per_node)
        parts = dict(self.parts if is_same_kind else self.parts_elsewhere)
        rest = parts.get(REST, self.deviation)
        return rest, *(parts.get(name, rest) for name in SEPARATE_PARTS)


def part_deviations(
    expected_s: Mapping[str, float], exchanged_s: float, spent_s: float, measured_parts_s: Mapping[str, float]
) -> tuple[tuple[str, float], ...]:
    """Return the deviations of the parts of a step that were measured separately, and the deviation of the rest.

    `correct_parts` with their inverse exponentials turns the forecast into the measured step. For exposed
    communication, the time of all collectives, hidden ones included, is added to both sides of the ratio. So a run that
    waits although all collectives were to be hidden shows which share is not hidden, and gives no infinite ratio.

    Args:
        expected_s: the parts of the forecast.
        exchanged_s: seconds of all collectives by the same forecast, hidden ones included.
        spent_s: seconds of the measured step.
        measured_parts_s: seconds of it that some of `SEPARATE_PARTS` took, less than all, each with a forecast above 0.
    """
    rest_s = sum(expected_s.values()) - sum(expected_s[name] for name in measured_parts_s)
    rest = rest_s / (spent_s - sum(measured_parts_s.values()))
    known = {REST: math.log(rest)}
    for name, seconds in measured_parts_s.items():
        beside = exchanged_s if name == "communication" else 0.0
        known[name] = math.log((expected_s[name] + beside) / (seconds + beside / rest))
    return tuple(known.items())


def correct_parts(parts_s: Mapping[str, Floats], hidden_s: Floats, ratios: Floats) -> dict[str, Floats]:
    """Return the parts of steps, (n,) each, times the ratios of `JobRuns.factors_of_plans`, (3, n).

    No step becomes longer or shorter by more than `MAX_RATIO`. `hidden_s` are the seconds of collectives that
    computation hides, (n,).
    """
    rest, exposed, update = ratios
    parts = {name: value * rest for name, value in parts_s.items()}
    exchanged = parts_s["communication"] + hidden_s
    gained = parts_s["communication"] * exposed + exchanged * (exposed - rest)
    parts |= {"communication": np.maximum(gained, 0.0), "optimizer": parts_s["optimizer"] * update}
    step_s, before = (np.sum(list(one.values()), axis=0) for one in (parts, parts_s))
    within = np.clip(step_s / before, 1 / MAX_RATIO, MAX_RATIO) * before / step_s
    return {name: value * within for name, value in parts.items()}


def shared_levels(run: JobRun, setting: RunSetting, plans: Plans) -> Mask:
    """Return which deviations a run shares with each of the plans at a setting: a row for each of `LEVELS`, (6, n)."""
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
    """Return the standard deviations of `calibration.toml` for runs of one job, by name.

    The mapping also has `odd`, the deviation of an odd setting, `odd_share`, the share of settings that are odd, and
    `narrowing`.
    """
    keys = (*LEVELS, "run", "report", "odd", "odd_share", "narrowing")
    table = FactFile.read_shipped("tilecast.learning", "calibration.toml").read_values("job", keys)
    return {name: float(value) for name, value in table.items()}


@dataclass(frozen=True, slots=True)
class JobRuns:
    """Runs of one job, and the corrections that follow from them; without runs, forecasts do not change."""

    runs: tuple[JobRun, ...] = ()

    def factors_of_plans(
        self, setting: RunSetting, plans: Plans, gpus_per_node: int, sigmas: Mapping[str, float] | None = None
    ) -> tuple[Floats, Floats]:
        """Return the factors on parts of the steps of plans, (3, n), and on the half-width of their ranges, (n,).

        The first row of the factors is for the parts that are corrected together, the others are for `SEPARATE_PARTS`.

        Args:
            setting: the GPU and the properties of the workload.
            plans: the plans, (n,).
            gpus_per_node: GPUs of a node there.
            sigmas: standard deviations to use instead of `shipped_deviations()`.
        """
        if not self.runs:
            return np.ones((1 + len(SEPARATE_PARTS), len(plans))), np.ones(len(plans))
        run_plans = Plans.from_plans(*(one.plan for one in self.runs))
        mutual = np.stack(
            [self._shared_levels(one.place, run_plans.take(np.array([k]))) for k, one in enumerate(self.runs)], axis=-1
        )
        reports = np.array([one.reports for one in self.runs])
        shared = self._shared_levels(setting, plans)
        of_job = [name in ("job", "architecture") for name in LEVELS]
        relative = np.array([one.is_relative for one in self.runs])
        shared &= np.array(of_job)[:, None, None] | ~relative[:, None]
        deviation, most = np.array([[one.deviation for one in self.runs]]), np.array([[MAX_RATIO]])
        judged = deviation
        if any(one.parts for one in self.runs):
            links = [[one.deviations_of_parts(is_across) for one in self.runs] for is_across in LINK_KINDS]
            of_parts = np.array(links).swapaxes(-1, -2)
            deviation = of_parts.reshape(-1, len(self.runs))
            # A part such as a wait may be many times its forecast. Whether a setting is odd is judged by the rest.
            judged = np.broadcast_to(of_parts[:, :1], of_parts.shape).reshape(deviation.shape)
            most = np.tile([[MAX_RATIO], [MAX_EXPOSED_RATIO], [MAX_RATIO]], (len(LINK_KINDS), 1))
        known = sigmas or shipped_deviations()
        ratio, width = correction_factors(known, mutual[:, :, 0], shared, deviation, reports, judged)
        most = np.minimum(most, 1 + MAX_CHANGE_BY_OTHERS) if relative.all() else most
        shape = (len(LINK_KINDS), 1 + len(SEPARATE_PARTS), len(plans))
        ratios = np.broadcast_to(np.clip(ratio, 1 / most, most), (shape[0] * shape[1], shape[2])).reshape(shape)
        inside, across, pipelines = ratios
        return np.where(plans.pipeline > 1, pipelines, np.where(plans.gpus > gpus_per_node, across, inside)), width

    def waited_s(self, plans: Plans, gpus_per_node: int) -> Floats:
        """Return the seconds that steps of plans wait for the data loader of each node, (n,).

        They are proportional to the samples that a node loads, at the mean rate of the runs.
        """
        each = [one.waited_s / samples_per_node(Plans.from_plans(one.plan), one.gpus_per_node)[0] for one in self.runs]
        return float(np.mean(each)) * samples_per_node(plans, gpus_per_node)

    def _shared_levels(self, setting: RunSetting, plans: Plans) -> Mask:
        """Return the deviations that each run shares with each of the plans at a setting, (6, k, n)."""
        return np.stack([shared_levels(one, setting, plans) for one in self.runs], axis=1)


def samples_per_node(plans: Plans, gpus_per_node: int) -> Floats:
    """Return the samples of a step that each node loads, (n,)."""
    samples = plans.data * plans.micro_batch * plans.gradient_accumulation
    return np.asarray(samples / np.ceil(plans.gpus / gpus_per_node))


def correction_factors(
    sigmas: Mapping[str, float],
    mutual: Mask,
    shared: Mask,
    deviation: Floats,
    reports: Ints,
    judged: Floats | None = None,
) -> tuple[Floats, Floats]:
    """Return the factors on steps, and on the half-width of their ranges, (…, n) each.

    Leading axes are different jobs. The settings of a job's runs are either usual or odd. The variance of a setting's
    own part differs between the two, and the two predictions are weighted by the likelihood of the runs under each.
    Ranges use the mean variance, so that they do not depend on measurements. Ratios are not bounded here.

    Args:
        sigmas: standard deviations as in `shipped_deviations`.
        mutual: which of `LEVELS` the runs share with each other, (6, …, k, k).
        shared: which of them the runs share with the settings to correct, (6, …, k, n).
        deviation: deviations of the runs, (…, k).
        reports: number of reports of the runs, (…, k).
        judged: the deviations that tell whether the settings are odd, (…, k), if they are not those of `deviation`.
    """
    judged = deviation if judged is None else judged
    noise = (sigmas["run"] ** 2 + sigmas["report"] ** 2 / reports)[..., None] * np.eye(deviation.shape[-1])
    odd_share = sigmas["odd_share"]
    variances = {own: np.array([sigmas[name] ** 2 for name in (*LEVELS[:-1], own)]) for own in (LEVELS[-1], "odd")}
    odds, expected = [], []
    for variance, share in zip(variances.values(), (1 - odd_share, odd_share), strict=True):
        covariance, target = (np.tensordot(variance, one, 1) for one in (mutual, shared))
        weighed, told = (np.linalg.solve(covariance + noise, one[..., None])[..., 0] for one in (deviation, judged))
        odds.append(np.log(share) - 0.5 * ((judged * told).sum(-1) + np.linalg.slogdet(covariance + noise)[1]))
        expected.append((weighed[..., None] * target).sum(-2))
    odd = 1 / (1 + np.exp(np.clip(odds[0] - odds[1], -50, 50)))[..., None]
    mean = (1 - odd) * expected[0] + odd * expected[1]
    variance = (1 - odd_share) * variances[LEVELS[-1]] + odd_share * variances["odd"]
    covariance, target = (np.tensordot(variance, one, 1) for one in (mutual, shared))
    explained = (target * np.linalg.solve(covariance + noise, target)).sum(-2) / (variance.sum() + sigmas["run"] ** 2)
    left = 1.0 - np.clip(explained, 0.0, 1.0)
    return np.exp(-mean), np.asarray(left ** sigmas["narrowing"])
