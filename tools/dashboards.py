"""Writes the Grafana dashboards of the chart, from the tables below.

    python tools/dashboards.py                 # writes charts/tilecast/dashboards/*.json

A panel is a row of a table: what it shows, why one looks at it, its queries. Tests run every query against a real
Prometheus, so a metric that is renamed breaks them and not somebody's screen.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
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
"""Of a panel, in cells of Grafana's grid, which is 24 wide."""

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


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard. `variables` are labels to choose by, and the metric that knows their values."""

    uid: str
    title: str
    text: str
    variables: Mapping[str, str]
    rows: Mapping[str, tuple[Panel, ...]]
    window: str = "now-7d"

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for panels in self.rows.values() for panel in panels)


_KIND = 'gpu=~"$gpu", precision=~"$precision", family=~"$family"'
"""The matchers of every error series."""
_ERROR = "tilecast_prediction_relative_error_ratio"
_ABSOLUTE = "tilecast_prediction_absolute_relative_error_ratio"


def _quantile(share: float, metric: str, by: str, matchers: str = "") -> str:
    grouped = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({grouped}) (increase({metric}_bucket{{{matchers}}}[$__range])))"


_PREDICTION_ERROR = Board(
    "tilecast-prediction-error",
    "Tilecast / Prediction error",
    "Forecast against measured step times. The error is (predicted - observed) / observed: above zero the forecast "
    "was too slow. Raw is the model alone, calibrated what was forecast after learning from this cluster's runs.",
    {"gpu": f"{_ERROR}_count", "precision": f"{_ERROR}_count", "family": f"{_ERROR}_count"},
    {
        "How far off": (
            Panel(
                "Median absolute error", "Half of the forecasts were closer than this.", "stat", "percentunit",
                {"{{stage}}": _quantile(0.5, _ABSOLUTE, "stage", _KIND)}, 6,
            ),
            Panel(
                "Bias", "The median signed error of recent runs: what calibration should bring to zero.", "stat",
                "percentunit", {"{{stage}}": f"avg by (stage) (tilecast_prediction_bias_ratio{{{_KIND}}})"}, 6,
            ),
            Panel(
                "Inside the range", "Share of measured steps inside the forecast's range; 90 % is what it claims.",
                "stat", "percentunit",
                {"covered": f'sum(tilecast_prediction_interval_observations_total{{covered="true", {_KIND}}}) / '
                            f"sum(tilecast_prediction_interval_observations_total{{{_KIND}}})"}, 6,
            ),
            Panel(
                "Measurements scored", "Runs whose step was compared with its forecast.", "stat", "short",
                {"runs": f'sum({_ERROR}_count{{stage="raw", {_KIND}}})'}, 6,
            ),
        ),
        "By GPU": (
            Panel(
                "Absolute error by GPU, calibrated", "Median and 90th percentile.", "bars", "percentunit",
                {
                    "{{gpu}} median": _quantile(0.5, _ABSOLUTE, "gpu", f'stage="calibrated", {_KIND}'),
                    "{{gpu}} P90": _quantile(0.9, _ABSOLUTE, "gpu", f'stage="calibrated", {_KIND}'),
                },
            ),
            Panel(
                "Distribution of raw errors", "Runs by signed error, before calibration.", "heatmap", "percentunit",
                {"{{le}}": f'sum by (le) (increase({_ERROR}_bucket{{stage="raw", {_KIND}}}[$__rate_interval]))'},
            ),
            Panel(
                "Distribution of calibrated errors", "The same after calibration.", "heatmap", "percentunit",
                {"{{le}}": f'sum by (le) (increase({_ERROR}_bucket{{stage="calibrated", {_KIND}}}[$__rate_interval]))'},
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
                    "predicted {{gpu}}": _quantile(0.5, "tilecast_predicted_step_seconds", "gpu", _KIND),
                    "observed {{gpu}}": _quantile(0.5, "tilecast_observed_step_seconds", "gpu", _KIND),
                },
            ),
            Panel(
                "Calibration", "The factor on forecasts that this cluster's runs ask for; 1 is none.", "timeseries",
                "none", {"{{gpu}} {{precision}} {{family}}": f"tilecast_calibration_ratio{{{_KIND}}}"},
            ),
        ),
        "What it was good for": (
            Panel(
                "Advice followed", "Jobs that ran on the recommended pool, and those that did not.", "stat", "short",
                {"followed: {{followed}}": "sum by (followed) (tilecast_recommendation_followed_total)"}, 12,
            ),
            Panel(
                "GPU time saved", "GPU-seconds per step below the users' own baselines, over all measured steps, where "
                "the advice was followed.", "stat", "s", {"saved": "sum(tilecast_advice_saved_gpu_seconds_total)"}, 12,
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
                {"{{result}}": "sum by (result) (tilecast_recommendations_total)"},
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
            ),
            Panel(
                "Plans priced per second of search", "The speed of the search.", "stat", "short",
                {"plans/s": "sum(tilecast_plans_evaluated_total) / sum(tilecast_advice_duration_seconds_sum)"},
            ),
            Panel(
                "Forecast steps", "Of written recommendations, by GPU.", "timeseries", "s",
                {"{{gpu}}": _quantile(0.5, "tilecast_predicted_step_seconds", "gpu")},
            ),
        ),
        "GPUs": (
            Panel(
                "Capacity by pool", "Total, allocatable, and free where it is known.", "bars", "short",
                {"{{pool}} {{state}}": "sum by (pool, state) (tilecast_gpu_capacity)"}, 12,
            ),
            Panel(
                "GPU nodes without a pool", "Nodes that Tilecast does not price, and why.", "timeseries", "short",
                {"{{reason}}": "sum by (reason) (tilecast_unknown_accelerator_nodes)"}, 12,
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
                "Since the last event", "Of each watched resource. A watch is begun anew every ten minutes, which "
                "brings every object again.", "stat", "s",
                {"{{resource}}": "time() - max by (resource) (tilecast_watch_last_event_timestamp_seconds)"}, 6,
            ),
            Panel("Keys waiting", "Objects that are due.", "stat", "short", {"keys": "sum(tilecast_queue_keys)"}, 6),
        ),
        "Requests": (
            Panel(
                "Writes per second", "To the API server, by resource and HTTP outcome.", "timeseries", "reqps",
                {"{{resource}} {{outcome}}": "sum by (resource, outcome) "
                                             "(rate(tilecast_writes_total[$__rate_interval]))"},
            ),
            Panel(
                "Retries per minute", "Keys that had to be tried again.", "timeseries", "short",
                {"retries": "sum(rate(tilecast_retries_total[$__rate_interval])) * 60"},
            ),
            Panel(
                "Observations by outcome", "Measured steps that arrived, and why some were refused.", "bars", "short",
                {"{{source}} {{outcome}}": "sum by (source, outcome) (tilecast_observations_total)"},
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
"""Every dashboard by the name of its file."""

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
    built.unit(panel.unit).no_value("nothing yet")
    for name, (legend, query) in zip(ascii_uppercase, panel.queries.items(), strict=False):
        target = prom.Dataquery().ref_id(name).expr(query).legend_format(legend).datasource(_source())
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
    return built


def build(board: Board) -> models.Dashboard:
    """A dashboard as Grafana reads it."""
    made = dashboards.Dashboard(board.title).uid(board.uid).description(board.text).tags(["tilecast"])
    made.readonly().tooltip(models.DashboardCursorSync.CROSSHAIR).time(board.window, "now").refresh("1m")
    made.timezone("browser")
    made.with_variable(dashboards.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    for label, metric in board.variables.items():
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
    """A dashboard as a file holds it."""
    document = json.loads(JSONEncoder().encode(build(board)))
    return json.dumps(_stated(document), sort_keys=True, indent=2) + "\n"


def _stated(value: Any) -> Any:
    """Without the keys that say nothing."""
    if isinstance(value, dict):
        return {key: _stated(item) for key, item in value.items() if item is not None}
    return [_stated(item) for item in value] if isinstance(value, list) else value


def main() -> None:
    """Write every dashboard."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--output-dir", type=Path, default=FOLDER)
    folder: Path = parser.parse_args().output_dir
    for name, board in BOARDS.items():
        (folder / f"{name}.json").write_text(text(board), encoding="utf-8")


if __name__ == "__main__":
    main()
