"""`tilecast learning`: list, show and forget the measured runs of a cluster. For administrators."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tilecast import untrusted
from tilecast.api import pool_learning
from tilecast.api.calibration import ObservedRun
from tilecast.api.documents import MAX_JSON_BYTES
from tilecast.api.pool_learning import FORGET, ForgetRequest
from tilecast.cli import EXIT_OK
from tilecast.inputs.pools import run_kubectl
from tilecast.inputs.reading import read_text
from tilecast.learning.namespace_calibration import NamespaceCalibration, find_quarantine_reasons
from tilecast.spec import SpecError

RESOURCE = "poollearnings.tilecast.dev"
UNKNOWN = "(unknown)"
"""Namespace shown for runs of unknown origin, which releases before PoolLearnings recorded."""


def arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, purpose in (
        ("list", "runs of every pool by namespace, and what they say"),
        ("show", "every run: who measured it, when, how far its forecast was off, and whether it counts"),
        ("forget", "have the operator forget what a namespace or a job taught, or everything"),
    ):
        action = actions.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        action.add_argument(
            "--context", metavar="NAME", help="kubectl context of the cluster; absent takes the current"
        )
        action.add_argument("--pool", metavar="NAME", help="of this pool only")
        if name == "forget":
            what = action.add_mutually_exclusive_group(required=True)
            what.add_argument("--namespace", metavar="NAME", help=f"what this namespace taught; {UNKNOWN} is an origin")
            what.add_argument("--job", metavar="UID", help="what the job with this UID taught, as show prints it")
            what.add_argument("--all", action="store_true", help="everything; of the pool, if one is given")
        else:
            action.add_argument("--namespace", metavar="NAME", help="of this namespace only")
            action.add_argument(
                "--file", metavar="FILE", help=f"what `kubectl get {RESOURCE} -o json` printed; - is standard input"
            )
            action.add_argument(
                "--trusted",
                metavar="NAME,…",
                type=_split_names,
                default=(),
                help="namespaces that observations.trustedNamespaces lists",
            )


def _run_kubectl(context: str | None, *arguments: str) -> str:
    return run_kubectl(context, *arguments, remedy="check the context, and that you administer the cluster")


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def run(options: argparse.Namespace) -> int:
    if options.action == "forget":
        return _request_forgetting(options)
    text = read_text(options.file) if options.file else _run_kubectl(options.context, "get", RESOURCE, "-o", "json")
    runs = _parse_runs(text, options.file or f"kubectl get {RESOURCE}")
    rows = _format_run_list(runs, options) if options.action == "list" else _format_run_details(runs, options)
    print("\n".join(rows) if len(rows) > 1 else "no run was measured")
    return EXIT_OK


def _parse_runs(text: str, name: str) -> list[ObservedRun]:
    try:
        document = untrusted.parse_json(text, max_bytes=MAX_JSON_BYTES)
        items: list[Any] = document["items"] if document["kind"].endswith("List") else [document]
        runs = [run for item in items for run in pool_learning.read_learnt_runs(str(item["metadata"]["name"]), item)]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise SpecError(name, "holds no PoolLearnings", f"give what `kubectl get {RESOURCE} -o json` prints") from None
    return sorted(runs, key=lambda one: (one.time, one.uid))


def _list_run_states(runs: Sequence[ObservedRun], table: NamespaceCalibration) -> list[str]:
    """Return the state of each run: "counts", "superseded", or the reason why the run is quarantined."""
    standing = [""] * len(runs)
    for namespace, counting in table.runs.items():
        rows = [row for row, one in enumerate(runs) if one.run.namespace == namespace]
        counted = set(counting)
        for row, why in zip(rows, find_quarantine_reasons([runs[row].run for row in rows]), strict=True):
            standing[row] = why or ("counts" if runs[row].run in counted else "superseded")
    return standing


def _format_run_list(runs: Sequence[ObservedRun], options: argparse.Namespace) -> list[str]:
    table = NamespaceCalibration([one.run for one in runs], options.trusted)
    standing = _list_run_states(runs, table)
    groups: dict[tuple[str, str], list[int]] = {}
    for row, one in enumerate(runs):
        if _is_selected_by_options(one, options):
            groups.setdefault((one.run.pool, one.run.namespace), []).append(row)
    lines = [f"{'POOL':<24}{'NAMESPACE':<24}{'RUNS':>5}{'COUNT':>6}{'ERROR':>8}  SAY"]
    for (pool, namespace), rows in sorted(groups.items()):
        errors = sorted(math.expm1(runs[row].run.deviation) for row in rows)
        counting = sum(standing[row] == "counts" for row in rows)
        doubted = Counter(standing[row] for row in rows if standing[row] not in ("counts", "superseded"))
        say = "at its bound" if namespace in table.bounded else "trusted" if namespace in options.trusted else "whole"
        notes = ", ".join([say, *(f"{count} quarantined: {why}" for why, count in sorted(doubted.items()))])
        error = f"{errors[len(errors) // 2]:+.0%}"
        lines.append(f"{pool:<24}{namespace or UNKNOWN:<24}{len(rows):>5}{counting:>6}{error:>8}  {notes}")
    return lines


def _format_run_details(runs: Sequence[ObservedRun], options: argparse.Namespace) -> list[str]:
    standing = _list_run_states(runs, NamespaceCalibration([one.run for one in runs], options.trusted))
    lines = [f"{'TIME':<22}{'POOL':<20}{'NAMESPACE/JOB':<36}{'ACCOUNT':<20}{'ERROR':>8}  {'STANDING':<13}UID"]
    for one, why in zip(runs, standing, strict=True):
        if _is_selected_by_options(one, options):
            job = f"{one.run.namespace or UNKNOWN}/{one.job or '-'}"
            error = f"{math.expm1(one.run.deviation):+.0%}"
            account = one.account or one.source or "-"
            lines.append(f"{one.time:<22}{one.run.pool:<20}{job:<36}{account:<20}{error:>8}  {why:<13}{one.uid}")
    return lines


def _is_selected_by_options(run: ObservedRun, options: argparse.Namespace) -> bool:
    namespace = "" if options.namespace == UNKNOWN else options.namespace
    return options.pool in (None, run.run.pool) and namespace in (None, run.run.namespace)


def _request_forgetting(options: argparse.Namespace) -> int:
    namespace = "" if options.namespace == UNKNOWN else options.namespace
    asked = ForgetRequest.parse(str(ForgetRequest(namespace, options.job)))
    where = [options.pool] if options.pool else ["--all"]
    _run_kubectl(options.context, "annotate", RESOURCE, *where, f"{FORGET}={asked}", "--overwrite")
    print(f"asked the operator to forget {asked} of {options.pool or 'every pool'}")
    return EXIT_OK
