"""Settings of the operator, which are read from environment variables."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from tilecast.api.job_kinds import list_kinds_in_plural
from tilecast.planner.policies import POLICIES
from tilecast.spec import SpecError
from tilecast_operator.selector import LabelSelector

RECURSION_LIMIT = 11_000
"""Recursion limit. The API server accepts documents that are nested 10,000 levels deep. See `recursion`."""


def _setting(default: float | str | bool, text: str) -> Any:
    return field(default=default, metadata={"text": text})


def name_variable(item: Field[Any]) -> str:
    """Return the environment variable of a setting: `TILECAST_` and the setting's name in capitals.

    A suffix `_s` of the name becomes `_SECONDS`.
    """
    return f"TILECAST_{item.name.upper()}".removesuffix("_S") + ("_SECONDS" if item.name.endswith("_s") else "")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the operator. The defaults suit a cluster of a few thousand nodes."""

    listen_host: str = _setting("::", "Address of /metrics, /healthz and /readyz; :: is every one of both families.")
    listen_port: int = _setting(8080, "Port of the same; 0 takes any free one.")
    tls_certificate: str = _setting("", "File with the certificate of HTTPS, read anew when it changes; empty is HTTP.")
    tls_key: str = _setting("", "File with the certificate's key.")
    reports_per_client: float = _setting(10.0, "Reports that a client may send per second; ten times that at once.")
    instance: str = _setting(socket.gethostname(), "Name in Events; a pod's is its host name.")
    lease: str = _setting("", "namespace/name of the Lease that makes one of several replicas write; empty needs none.")
    lease_s: int = _setting(10, "How long others wait for a leader that says nothing more.")
    pod_ip: str = _setting("", "IP address at which other replicas reach this one.")
    writers: int = _setting(8, "Requests that write, under way at once.")
    advisors: int = _setting(1, "Threads that search for plans.")
    search_processes: int = _setting(
        0,
        "Processes that search in place of the threads; each takes some 165 MB. One more, of 90 MB, plans the queue. "
        "Searches and plans of threads have no limits.",
    )
    search_s: float = _setting(30.0, "Longest search; a longer one is ended with its process. Needs processes.")
    search_memory_mib: int = _setting(
        640, "Most private memory of a process that searches, in MiB; some 540 MiB are resident then. Needs processes."
    )
    journal: str = _setting(
        "",
        "Folder that outlives the process, an emptyDir, for notes of which objects are being read; empty keeps none.",
    )
    search_budget_s: float = _setting(
        30.0, "Seconds of searches in a minute after which the jobs of a namespace wait behind those of all others."
    )
    advice_cache: int = _setting(1024, "Distinct workloads whose advice is kept.")
    settle_s: float = _setting(0.5, "Node changes within this time are read as one.")
    request_timeout_s: float = _setting(30.0, "Limit of one request.")
    retry_first_s: float = _setting(0.5, "Wait before the first retry; then doubled.")
    retry_most_s: float = _setting(60.0, "Longest wait between retries.")
    config_map_poll_s: float = _setting(60.0, "How often the ConfigMap that holds a job's model is read again.")
    namespace_selector: str = _setting("", "LabelSelector, as JSON, of the namespaces whose jobs are answered.")
    owns_pools: bool = _setting(True, "Whether GPUPools are written; if not, another operator of the cluster does.")
    discovery: bool = _setting(True, "Whether GPUPools are created from nodes; if not, pools live in memory only.")
    pool_retention_s: float = _setting(86400.0, "How long a discovered pool counts on nodes that are gone.")
    read_resource_slices: bool = _setting(
        False, "Whether ResourceSlices of the NVIDIA DRA driver say which GPUs exist."
    )
    read_kueue: bool = _setting(False, "Whether Kueue's ClusterQueues and ResourceFlavors say what is free.")
    read_pods: bool = _setting(False, "Whether pods say what is free, of pools without a Kueue flavor.")
    jobs: bool = _setting(False, f"Whether {list_kinds_in_plural()} that ask for it are advised.")
    read_pod_config_maps: bool = _setting(
        False, "Whether ConfigMaps that a job's pods mount are read, for the launch that they hold."
    )
    place: bool = _setting(False, "Whether mode Initial may write the node choice into a job before it starts.")
    kueue_admission_gate: str = _setting(
        "auto",
        "Whether Kueue's feature gate AdmissionGatedBy is on: auto asks Kueue, present is believed where it gives no "
        "answer, absent in any case.",
    )
    requeue_s: float = _setting(
        600.0,
        "How long a placed job may wait for quota before it may have that of any flavor of its ranking; 0 is for ever.",
    )
    capacity_settle_s: float = _setting(5.0, "Changes of what is free within this time are read as one.")
    watch_check_s: float = _setting(60.0, "How often the watches are compared with what the API server counts.")
    utilization_model: str = _setting("", "File with the utilization model; empty is the one that ships.")
    utilization_model_sha256: str = _setting("", "SHA-256 that the model's file must have; empty checks nothing.")
    relist_s: float = _setting(3600.0, "How often everything is listed anew, in case an event was lost.")
    observe_settle_s: float = _setting(1.0, "Reports of a job within this time, times their number, are written once.")
    calibrate_settle_s: float = _setting(30.0, "Runs within this time change the calibration at once.")
    prometheus_url: str = _setting(
        "", "Prometheus that is asked for measured steps, http://host:9090; empty asks none."
    )
    prometheus_query: str = _setting(
        'tilecast_step_seconds{namespace="$namespace",trainingjob="$name"}',
        "PromQL for a job's step in seconds, where neither the job nor its pool has one.",
    )
    observation_queries: str = _setting(
        "pools",
        "Whose observationQuery Prometheus is asked: pools, or jobs as well, held to series of the job's namespace.",
    )
    dcgm_selector: str = _setting(
        'namespace="$namespace",pod=~"$pods"',
        "Labels by which Prometheus has dcgm-exporter's metrics of a job's pods; empty asks for none.",
    )
    prometheus_poll_s: float = _setting(60.0, "How often each job's step is asked for.")
    read_logs: bool = _setting(False, "Whether steps are read from the logs of pods of jobs that TrainingJobs name.")
    log_poll_s: float = _setting(300.0, "How often each job's log is read.")
    learning: bool = _setting(
        True, "Whether measured steps correct forecasts; if not, they are only held against them."
    )
    trusted_namespaces: str = _setting(
        "", "Namespaces whose runs count fully for everybody, with commas between; others have a bounded say."
    )
    queue: bool = _setting(False, "Whether all jobs are planned at once: which one on which pool, and when.")
    queue_policy: str = _setting("completion", "What that plan minimizes: completion, makespan, cost or fairness.")
    queue_interval_s: float = _setting(2.0, "The least time between two of those plans.")
    queue_estimates: bool = _setting(
        False, "Whether annotations of Kueue's Workloads say when a waiting job starts and how long it runs."
    )
    queue_name: str = _setting("cluster", "Name of the QueueAdvice that tells of the plan.")
    stall_s: float = _setting(300.0, "/healthz fails when work waits this long untouched.")
    node_selector: str = _setting("", "Label selector of the nodes to watch; empty is all.")


def from_environment(environment: Mapping[str, str]) -> Settings:
    """Return the settings in an environment.

    Unknown variables are ignored, because Kubernetes itself sets some that begin with the name of a Service.

    Raises:
        SpecError: A variable has a value of the wrong type or out of range.
    """
    known = {name_variable(item): item for item in fields(Settings)}
    values: dict[str, Any] = {
        item.name: _parse_value(item, environment[name]) for name, item in known.items() if name in environment
    }
    settings = Settings(**values)
    check_lease_name(settings.lease, "TILECAST_LEASE")
    LabelSelector.from_json(settings.namespace_selector, "TILECAST_NAMESPACE_SELECTOR")
    return settings


def check_lease_name(text: str, field_name: str) -> str:
    """Return a text unchanged if it is empty or the `namespace/name` of a Lease.

    Raises:
        SpecError: The text has another form.
    """
    if text and not _LEASE.fullmatch(text):
        remedy = "write namespace/name of a Lease, or nothing"
        raise SpecError(field_name, f"{text[:40]!r} is no namespace/name", remedy)
    return text


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "kueue_admission_gate": ("auto", "present", "absent"),
    "observation_queries": ("pools", "jobs"),
    "queue_policy": tuple(POLICIES),
}
_LEASE = re.compile(r"[-a-z0-9]+/[-.a-z0-9]+")
_MAY_BE_NOTHING = (
    "listen_port", "settle_s", "capacity_settle_s", "observe_settle_s", "calibrate_settle_s", "search_processes",
    "requeue_s",
)  # fmt: skip


def _parse_value(item: Field[Any], text: str) -> int | float | str | bool:
    if str(item.type) == "bool":
        if text.lower() not in ("true", "false"):
            raise SpecError(name_variable(item), f"{text[:40]!r} is not true or false", item.metadata["text"])
        return text.lower() == "true"
    name, kind = name_variable(item), {"int": int, "float": float, "str": str}[str(item.type)]
    try:
        value: int | float | str = kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise SpecError(name, f"{text[:40]!r} is not {expected}", item.metadata["text"]) from None
    if (choices := _CHOICES.get(item.name)) and value not in choices:
        raise SpecError(name, f"{text[:40]!r} is no choice", f"use one of {', '.join(choices)}")
    least = 0 if item.name in _MAY_BE_NOTHING else 1 if kind is int else 1e-3
    if not isinstance(value, str) and not least <= value <= 1e9:
        raise SpecError(name, f"{text[:40]} is out of range", f"use {least} or more")
    return value
