"""Write the Grafana dashboards of the chart, from the tables below.

    python tools/dashboards.py                 # writes charts/tilecast/dashboards/*.json

A panel is a row of a table: its title, its purpose and its queries. Tests run every query against a real Prometheus, so
that a renamed metric fails a test instead of emptying a panel.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Literal

from grafana_foundation_sdk.builders import bargauge, heatmap, stat, timeseries
from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import prometheus as prom
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as models_prom

FOLDER = Path(__file__).resolve().parent.parent / "charts" / "tilecast" / "dashboards"
HEIGHT = 8
"""Height of a panel, in cells of Grafana's grid, which is 24 cells wide."""

Kind = Literal["timeseries", "stat", "bars", "heatmap"]


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `queries` are PromQL expressions by legend."""

    title: str
    text: str
    kind: Kind
    unit: str
    queries: Mapping[str, str]
    width: int = 8
    limits: Mapping[str, float] = field(default_factory=dict)
    """Values from which the panel turns yellow, orange or red; it is green below, unless green has a value."""
    runbook: str = ""
    """Alert that watches the same values."""


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard.

    `variables` are labels to filter by, and the metric that has their values. Cluster and namespace of the operator
    come before them.
    """

    uid: str
    title: str
    text: str
    variables: Mapping[str, str]
    rows: Mapping[str, tuple[Panel, ...]]
    window: str = "now-7d"

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for panels in self.rows.values() for panel in panels)


_SCOPE = 'cluster=~"$cluster", namespace=~"$namespace"'
"""Label matchers of every series."""
_KIND = 'gpu=~"$gpu", precision=~"$precision", family=~"$family"'
"""Label matchers of gauges and counters of a GPU, precision and family."""
_GPU = 'gpu=~"$gpu"'
"""Label matchers of histograms, which have only a GPU."""
_ERROR = "tilecast_prediction_relative_error_ratio"
_ABSOLUTE = "tilecast_prediction_absolute_relative_error_ratio"


def _quantile(share: float, metric: str, by: str, matchers: str = "") -> str:
    grouped = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({grouped}) (increase({metric}_bucket{{{matchers}}}[$__range])))"


def scoped(query: str) -> str:
    """Return a query limited to the selected clusters and namespaces."""
    pattern = r"\b(tilecast_\w+|tilecast(?::\w+)+)(?:\{([^}]*)\})?"
    return re.sub(pattern, lambda one: f"{one[1]}{{{', '.join(filter(None, (one[2], _SCOPE)))}}}", query)


_PREDICTION_ERROR = Board(
    "tilecast-prediction-error",
    "Tilecast / Prediction error",
    "Forecast against measured step times. The error is (predicted - observed) / observed: above zero the forecast "
    "was too slow. Raw is the model alone, calibrated what was forecast after learning from this cluster's runs.",
    {"gpu": f"{_ERROR}_count", "precision": "tilecast_prediction_runs", "family": "tilecast_prediction_runs"},
    {
        "How far off": (
            Panel(
                "Median absolute error", "Half of the jobs were closer than this; each counts once.", "stat",
                "percentunit",
                {"{{stage}}": "quantile by (stage) "
                              f"(0.5, tilecast_prediction_run_absolute_relative_error_ratio{{{_KIND}}})"},
                6, {"yellow": 0.15, "red": 0.25}, "TilecastPredictionErrorHigh",
            ),
            Panel(
                "Bias", "The median signed error of recent runs: what calibration should bring to zero.", "stat",
                "percentunit",
                {"{{stage}}": f"quantile by (stage) (0.5, tilecast_prediction_bias_ratio{{{_KIND}}})"}, 6,
                {"green": -0.15, "red": 0.15}, "TilecastPredictionBias",
            ),
            Panel(
                "Inside the range", "Share of jobs that ran inside the forecast's range; 90 % is what it claims.",
                "stat", "percentunit",
                {"covered": f'sum(increase(tilecast_prediction_interval_runs_total{{covered="true", {_KIND}}}'
                            "[$__range])) / "
                            f"sum(increase(tilecast_prediction_interval_runs_total{{{_KIND}}}[$__range]))"}, 6,
                {"yellow": 0.75, "green": 0.85}, "TilecastRangeTooNarrow",
            ),
            Panel(
                "Measurements scored", "Steps that were compared with their forecasts.", "stat", "short",
                {"steps": f'sum(increase({_ERROR}_count{{stage="raw", {_GPU}}}[$__range]))'}, 6,
            ),
        ),
        "By GPU": (
            Panel(
                "Absolute error by GPU, raw and calibrated",
                "Median and 90th percentile over all precisions and families; raw is before.", "bars", "percentunit",
                {
                    "{{gpu}} median, {{stage}}": _quantile(0.5, _ABSOLUTE, "gpu, stage", _GPU),
                    "{{gpu}} P90, {{stage}}": _quantile(0.9, _ABSOLUTE, "gpu, stage", _GPU),
                },
            ),
            Panel(
                "Distribution of raw errors", "Runs by signed error, before calibration.", "heatmap", "percentunit",
                {"{{le}}": f'sum by (le) (increase({_ERROR}_bucket{{stage="raw", {_GPU}}}[$__rate_interval]))'},
            ),
            Panel(
                "Distribution of calibrated errors", "The same after calibration.", "heatmap", "percentunit",
                {"{{le}}": f'sum by (le) (increase({_ERROR}_bucket{{stage="calibrated", {_GPU}}}[$__rate_interval]))'},
            ),
        ),
        "Over time": (
            Panel(
                "Bias over time", "A line that leaves zero is a cluster that changed, or a model it does not know.",
                "timeseries", "percentunit",
                {"{{gpu}} {{precision}} {{family}}, {{stage}}": f"tilecast_prediction_bias_ratio{{{_KIND}}}"},
            ),
            Panel(
                "Predicted and observed step", "Medians of forecasts and of measurements.", "timeseries", "s",
                {
                    "predicted {{gpu}}": _quantile(0.5, "tilecast_predicted_step_seconds", "gpu", _GPU),
                    "observed {{gpu}}": _quantile(0.5, "tilecast_observed_step_seconds", "gpu", _GPU),
                },
            ),
            Panel(
                "Calibration", "The factor on forecasts that this cluster's runs ask for; 1 is none.", "timeseries",
                "none", {"{{gpu}} {{precision}} {{family}}": f"tilecast_calibration_ratio{{{_KIND}}}"},
            ),
        ),
        "One job's run": (
            Panel(
                "Jobs that a measured run corrects", "By whose run: the job's own, one of the same workload, or one of "
                "another workload under its name.", "timeseries", "short",
                {"{{run}}": "sum by (run) (tilecast_own_runs_jobs)"}, 12,
            ),
            Panel(
                "What it changes", "Median change of the best forecast of those jobs, without its sign.", "timeseries",
                "percentunit", {"{{run}}": "max by (run) (tilecast_own_runs_change_ratio)"}, 12,
            ),
        ),
        "What it was good for": (
            Panel(
                "Advice followed", "Jobs that ran on the recommended pool, and those that did not.", "stat", "short",
                {"followed: {{followed}}": "sum by (followed) "
                                           "(increase(tilecast_recommendation_followed_total[$__range]))"}, 12,
            ),
            Panel(
                "GPU time saved", "GPU-seconds per step below the users' own baselines, over all measured steps, where "
                "the advice was followed.", "stat", "s",
                {"saved": "sum(increase(tilecast_advice_saved_gpu_seconds_total[$__range]))"}, 12,
            ),
        ),
    },
)  # fmt: skip

_ADVISOR = Board(
    "tilecast-advisor",
    "Tilecast / Advisor",
    "What was recommended and refused, how long it took, and which GPUs Tilecast sees.",
    {},
    {
        "Advice": (
            Panel(
                "Answers by reason", "Every verdict written to a job. Advised has a recommendation.", "bars", "short",
                {"{{result}}": "sum by (result) (increase(tilecast_recommendations_total[$__range]))"},
                runbook="TilecastInternalErrors",
            ),
            Panel(
                "Recommendations that changed", "By the reason for the new one.", "timeseries", "short",
                {"{{reason}}": "sum by (reason) (increase(tilecast_recommendation_changes_total[$__rate_interval]))"},
            ),
            Panel(
                "Refusals per hour", "Jobs that got a reason instead of a recommendation.", "timeseries", "short",
                {"{{result}}": 'sum by (result) (rate(tilecast_recommendations_total{result!="Advised"}'
                               "[$__rate_interval])) * 3600"},
            ),
        ),
        "Work": (
            Panel(
                "Time to search", "One workload over all pools.", "timeseries", "s",
                {
                    "median": _quantile(0.5, "tilecast_advice_duration_seconds", ""),
                    "P95": _quantile(0.95, "tilecast_advice_duration_seconds", ""),
                },
                limits={"red": 3.0}, runbook="TilecastSearchSlow",
            ),
            Panel(
                "Plans priced per second of search", "The speed of the search.", "stat", "short",
                {"plans/s": "sum(increase(tilecast_plans_evaluated_total[$__range])) / "
                            "sum(increase(tilecast_advice_duration_seconds_sum[$__range]))"},
            ),
            Panel(
                "Forecast steps", "Of written recommendations, by GPU.", "timeseries", "s",
                {"{{gpu}}": _quantile(0.5, "tilecast_predicted_step_seconds", "gpu")},
            ),
        ),
        "The whole queue": (
            Panel(
                "Mean completion by the plan", "Beside what it would be without a plan for all jobs, on the same "
                "forecasts; nothing without queue.enabled.", "timeseries", "s",
                {"{{way}}": "max by (way) (tilecast_queue_advice_completion_seconds)"}, 12,
            ),
            Panel(
                "Jobs of the plan", "That wait, that run, and that cannot be planned.", "timeseries", "short",
                {"{{state}}": "max by (state) (tilecast_queue_advice_jobs)"}, 6,
            ),
            Panel(
                "Time to plan", "The slowest of a hundred plans.", "timeseries", "s",
                {"p99": _quantile(0.99, "tilecast_queue_advice_duration_seconds", "")}, 6,
            ),
        ),
        "GPUs": (
            Panel(
                "Capacity by pool", "Total, allocatable, and free where it is known.", "bars", "short",
                {"{{cluster}} {{pool}} {{state}}": "max by (cluster, pool, state) (tilecast_gpu_capacity)"}, 12,
            ),
            Panel(
                "GPU nodes without a pool", "Nodes that Tilecast does not price, and why.", "timeseries", "short",
                {"{{reason}}": "max by (reason) (tilecast_unknown_accelerator_nodes)"}, 12, {"yellow": 1.0},
                "TilecastUnknownAccelerators",
            ),
        ),
    },
    "now-24h",
)  # fmt: skip

_HEALTH = Board(
    "tilecast-operator-health",
    "Tilecast / Operator health",
    "Whether the operator keeps up, and what the API server says to it.",
    {},
    {
        "Now": (
            Panel(
                "Version", "Of the program that answers.", "stat", "none", {"{{version}}": "tilecast_build_info"}, 6
            ),
            Panel(
                "Utilization model", "Version and digest of the network in use.", "stat", "none",
                {"{{version}} {{sha256}}": "tilecast_model_info"}, 6,
            ),
            Panel(
                "Last list or watch answered", "Time since the API server last answered one of each resource: at most "
                "eleven minutes, however quiet the cluster is.", "stat", "s",
                {"{{resource}}": "time() - min by (resource) (tilecast_watch_last_event_timestamp_seconds)"}, 6,
                {"yellow": 900.0, "red": 1800.0}, "TilecastWatchStale",
            ),
            Panel(
                "Keys waiting", "Objects that are due, or failed the last time.", "stat", "short",
                {"{{kind}}": "sum by (kind) (tilecast_queue_keys)"}, 6, {"yellow": 20.0, "red": 100.0},
                "TilecastBacklog",
            ),
        ),
        "Answers": (
            Panel(
                "Answered within ten seconds", "Share of jobs, new or changed, whose answer was in time; the "
                "objective is 99 %.", "stat", "percentunit",
                {"{{kind}}": 'sum by (kind) (increase(tilecast_answer_duration_seconds_bucket{le="10.0"}[$__range])) / '
                             "sum by (kind) (increase(tilecast_answer_duration_seconds_count[$__range]))"},
                8, {"yellow": 0.95, "green": 0.99}, "TilecastAnswersLate",
            ),
            Panel(
                "Time to answer", "From a job, new or changed, to its written answer.", "timeseries", "s",
                {
                    "{{kind}} median": _quantile(0.5, "tilecast_answer_duration_seconds", "kind"),
                    "{{kind}} P99": _quantile(0.99, "tilecast_answer_duration_seconds", "kind"),
                }, 16, {"red": 10.0}, "TilecastAnswersLate",
            ),
        ),
        "Held jobs": (
            Panel(
                "Jobs held now", "Jobs in mode Initial that wait for Tilecast.", "stat", "short",
                {"jobs": "max(tilecast_held_jobs)"}, 4, {"yellow": 10.0}, "TilecastJobsHeld",
            ),
            Panel(
                "Longest wait now", "Of the job that waits longest; ten seconds are promised.", "stat", "s",
                {"wait": "max(tilecast_oldest_held_seconds)"}, 4, {"yellow": 10.0, "red": 60.0}, "TilecastJobsHeld",
            ),
            Panel(
                "Time until let go", "From a job that waits to its start being allowed.", "timeseries", "s",
                {
                    "median": _quantile(0.5, "tilecast_placement_wait_seconds", ""),
                    "P99": _quantile(0.99, "tilecast_placement_wait_seconds", ""),
                }, 8, {"red": 10.0}, "TilecastPlacementsMissed",
            ),
            Panel(
                "Outcomes", "Of jobs in mode Initial, and those that were released again.", "bars", "short",
                {
                    "{{outcome}}": "sum by (outcome) (increase(tilecast_placements_total[$__range]))",
                    "Requeued": "sum(increase(tilecast_requeued_total[$__range]))",
                }, 8, runbook="TilecastPlacementsRequeued",
            ),
        ),
        "Waiting": (
            Panel(
                "Oldest job without an answer", "How long it has waited.", "timeseries", "s",
                {"{{kind}}": "max by (kind) (tilecast_oldest_unanswered_seconds)"}, 16,
                {"yellow": 60.0, "red": 600.0}, "TilecastAnswerOverdue",
            ),
            Panel("Namespaces over their budget", "Of searches: their jobs wait behind those of others.", "stat",
                  "short", {"namespaces": "max(tilecast_namespaces_over_search_budget)"}, 8, {"yellow": 1.0}),
        ),
        "Process": (
            Panel(
                "Memory", "Resident, of each operator; the chart's limit is 768 MiB.", "timeseries", "bytes",
                {"{{cluster}} {{namespace}} {{pod}}": "max by (cluster, namespace, pod) "
                                                      "(tilecast_process_resident_memory_bytes)"},
                12, {"yellow": 300 * 2.0**20, "red": 450 * 2.0**20},
            ),
            Panel(
                "Processor", "Cores that each operator keeps busy.", "timeseries", "short",
                {"{{cluster}} {{namespace}} {{pod}}": "sum by (cluster, namespace, pod) "
                                                      "(rate(tilecast_process_cpu_seconds_total[$__rate_interval]))"},
                12,
            ),
        ),
        "Searches": (
            Panel(
                "Search under way", "How long the oldest one has run.", "timeseries", "s",
                {"{{cluster}} {{namespace}} {{pod}}": "max by (cluster, namespace, pod) "
                                                      "(tilecast_search_running_seconds)"},
                8, {"red": 10.0}, "TilecastSearchSlow",
            ),
            Panel(
                "Memory of searches", "Resident, of the processes that search.", "timeseries", "bytes",
                {"{{cluster}} {{namespace}} {{pod}}": "max by (cluster, namespace, pod) "
                                                      "(tilecast_search_process_resident_memory_bytes)"}, 8,
            ),
            Panel(
                "Search processes replaced", "By cause.", "bars", "short",
                {"{{cause}}": "sum by (cause) (increase(tilecast_search_process_restarts_total[$__range]))"}, 4,
                {"red": 1.0}, "TilecastSearchesInterrupted",
            ),
            Panel(
                "Set aside", "Objects at which the operator died.", "stat", "short",
                {"{{kind}}": "max by (kind) (tilecast_quarantined_objects) or 0 * max(tilecast_leader)"}, 4,
                {"red": 1.0}, "TilecastInputQuarantined",
            ),
        ),
        "Requests": (
            Panel(
                "Writes per second", "To the API server, by resource and HTTP outcome.", "timeseries", "reqps",
                {"{{resource}} {{outcome}}": "sum by (resource, outcome) "
                                             "(rate(tilecast_writes_total[$__rate_interval]))"},
                runbook="TilecastWritesFailing",
            ),
            Panel(
                "Retries per minute", "Keys that had to be tried again.", "timeseries", "short",
                {"retries": "sum(rate(tilecast_retries_total[$__rate_interval])) * 60"},
            ),
            Panel(
                "Observations by outcome", "Measured steps that arrived, and why some were refused.", "bars", "short",
                {"{{source}} {{outcome}}": "sum by (source, outcome) (increase(tilecast_observations_total[$__range])) "
                                           "> 0"},
                runbook="TilecastObservationsRefused",
            ),
        ),
    },
    "now-6h",
)  # fmt: skip

BOARDS: Mapping[str, Board] = {
    "prediction-error": _PREDICTION_ERROR,
    "advisor": _ADVISOR,
    "operator-health": _HEALTH,
}
"""Dashboards by the name of their file."""

_BUILDERS: Mapping[Kind, Any] = {
    "timeseries": timeseries.Panel,
    "stat": stat.Panel,
    "bars": bargauge.Panel,
    "heatmap": heatmap.Panel,
}


def _source() -> models.DataSourceRef:
    return models.DataSourceRef(type_val="prometheus", uid="${datasource}")


def _panel(panel: Panel) -> Any:
    built = _BUILDERS[panel.kind]()
    built.title(panel.title).description(panel.text).datasource(_source()).span(panel.width).height(HEIGHT)
    built.unit(panel.unit).no_value("nothing yet").thresholds(_thresholds(panel.limits))
    if panel.runbook:
        url = f"docs/runbooks.md#{panel.runbook.lower()}"
        built.links([dashboards.DashboardLink("Runbook").type(models.DashboardLinkType.LINK).url(url)])
    for name, (legend, query) in zip(ascii_uppercase, panel.queries.items(), strict=False):
        target = prom.Dataquery().ref_id(name).expr(scoped(query)).legend_format(legend).datasource(_source())
        if panel.kind in ("stat", "bars"):
            target.instant()
        if panel.kind == "heatmap":
            target.format(models_prom.PromQueryFormat.HEATMAP)
        built.with_target(target)
    if panel.kind in ("stat", "bars"):
        built.reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(values=False))
    if panel.kind == "stat":
        built.text_mode(common.BigValueTextMode.VALUE_AND_NAME).graph_mode(common.BigValueGraphMode.NONE)
    if panel.kind == "bars":
        built.orientation(common.VizOrientation.HORIZONTAL)
    if panel.kind == "heatmap":
        built.calculate(calculate=False).show_legend()
    if panel.kind == "timeseries":
        built.line_width(2).fill_opacity(5).show_points(common.VisibilityMode.AUTO)
        if panel.limits:
            line = common_builders.GraphThresholdsStyleConfig().mode(common.GraphTresholdsStyleMode.LINE)
            built.thresholds_style(line)
    return built


def _thresholds(limits: Mapping[str, float]) -> dashboards.ThresholdsConfig:
    """Return the thresholds of a panel. Below the lowest value it is green, or red if green has a value itself."""
    lowest = models.Threshold(None, "red" if "green" in limits else "green")
    steps = [models.Threshold(value, color) for color, value in limits.items()]
    return dashboards.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps([lowest, *steps])


def build(board: Board) -> models.Dashboard:
    """Return a dashboard as Grafana reads it."""
    made = dashboards.Dashboard(board.title).uid(board.uid).description(board.text).tags(["tilecast"])
    made.readonly().tooltip(models.DashboardCursorSync.CROSSHAIR).time(board.window, "now").refresh("1m")
    made.timezone("browser")
    made.with_variable(dashboards.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    variables = {"cluster": "tilecast_build_info", "namespace": "tilecast_build_info", **board.variables}
    for label, metric in variables.items():
        made.with_variable(
            dashboards.QueryVariable(label)
            .query(f"label_values({metric}, {label})")
            .datasource(_source())
            .multi(multi=True)
            .include_all(include_all=True)
            .all_value(".*")
            .current(models.VariableOption(selected=True, text="All", value="$__all"))
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        )
    for title, panels in board.rows.items():
        made.with_row(dashboards.Row(title))
        for panel in panels:
            made.with_panel(_panel(panel))
    return made.build()


def text(board: Board) -> str:
    """Return the content of a dashboard's file."""
    document = json.loads(JSONEncoder().encode(build(board)))
    return json.dumps(stated(document), sort_keys=True, indent=2) + "\n"


def stated(value: Any) -> Any:
    """Return a document without keys that have no value."""
    if isinstance(value, dict):
        return {key: stated(item) for key, item in value.items() if item is not None}
    return [stated(item) for item in value] if isinstance(value, list) else value


def main() -> None:
    """Write every dashboard."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--output-dir", type=Path, default=FOLDER)
    folder: Path = parser.parse_args().output_dir
    for name, board in BOARDS.items():
        (folder / f"{name}.json").write_text(text(board), encoding="utf-8")


if __name__ == "__main__":
    main()
