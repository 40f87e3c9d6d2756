"""Pools that a job may use, and the pool that the job would run on without advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tilecast.advice import Advice, Baseline, Offer, Rejection, Request
from tilecast.hardware import Pool, find_gpu
from tilecast.hardware.instances import find_node_type
from tilecast.jobs.claims import match_devices
from tilecast.jobs.interface import Job, Placement, Pods, is_node_kind_label
from tilecast.jobs.kueue import Flavor, LocalQueue
from tilecast.nodes import PublishedDevice, gpu_resource
from tilecast.nodes.labels import read_label_table
from tilecast.spec import SpecError

MAX_REASON = 256
"""Most characters of a reason in a status."""
Labels: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CandidatePool:
    """A pool that a job may use, reduced to the nodes and GPUs that are available to the job."""

    pool: Pool
    """The pool, with no more nodes and GPUs than the job can have."""
    flavor: Flavor | None
    """Kueue flavor of the pool. None if Kueue does not manage the job."""
    node_selector: Labels
    tolerations: tuple[Mapping[str, str], ...]
    device_requests: tuple[str, ...] = ()
    """Names of the requests in the job's ResourceClaims that the pool's devices satisfy."""

    def has_room(self, gpus: int) -> bool:
        """Return whether the queue has free quota for `gpus` GPUs now."""
        return self.flavor is None or gpus <= self.flavor.free


@dataclass(frozen=True, slots=True)
class JobCandidates:
    """Pools that a job may use, reasons why it may not use the others, and the pool that it uses without advice."""

    usable: tuple[CandidatePool, ...]
    rejections: tuple[Rejection, ...]
    baseline: Baseline | None
    """The job's own number of GPUs on the pool that its selectors or its queue's flavors determine.

    None if they do not determine a single pool.
    """

    @property
    def pools(self) -> list[Pool]:
        return [item.pool for item in self.usable]

    def find_candidate(self, pool_name: str) -> CandidatePool:
        """Return the candidate with this pool name. Raise StopIteration if there is none."""
        return next(item for item in self.usable if item.pool.name == pool_name)


def find_candidates(
    job: Job,
    pools: Sequence[Pool],
    nodes: Iterable[Labels],
    queue: LocalQueue | None,
    devices: Mapping[str, Sequence[PublishedDevice]] | None = None,
    *,
    writes_advice: bool,
) -> JobCandidates:
    """Return the pools that a job may use, the reasons against all others, and the pool it would use without advice.

    Args:
        job: the job.
        pools: the pools of the cluster.
        nodes: the labels of every node that has GPUs.
        queue: the job's queue, if Kueue manages it.
        devices: the devices that ResourceSlices publish, by pool name. If None, the job's ResourceClaims are ignored.
        writes_advice: whether the advice will be written into the job (mode Initial). The nodes of a pool must then
            have enough GPUs for a pod, and the pods must tolerate every taint of the pool.

    Raises:
        SpecError: a selector in the job's ResourceClaims cannot be evaluated.
    """
    kinds = _count_nodes_by_labels(job.workers, pools, nodes, queue)
    usable, rejections = list[CandidatePool](), list[Rejection]()
    for pool in sorted(pools, key=lambda item: item.name):
        met = () if devices is None else match_devices(job, devices.get(pool.name, ()))
        candidate = (
            _build_claim_rejection(pool, met)
            if isinstance(met, str)
            else _check_pool(job, pool, kinds, queue, writes_advice)
        )
        if isinstance(candidate, Rejection):
            rejections.append(candidate)
        else:
            usable.append(candidate if isinstance(met, str) else replace(candidate, device_requests=met))
    return JobCandidates(
        tuple(usable), tuple(rejections), _find_baseline(job, [item.pool for item in usable], kinds, queue)
    )


def find_selected_pools(workers: Sequence[Pods], pools: Sequence[Pool], nodes: Iterable[Labels]) -> list[Pool]:
    """Return the pools whose nodes match the node selectors and affinities that pods have at present.

    Args:
        workers: those pods of a job that have GPUs.
        pools: the pools.
        nodes: the labels of every node that has GPUs. If empty, pools are selected only by the GPU and the instance
            type that the pods require.
    """
    kinds = _count_nodes_by_labels(workers, pools, nodes, None)
    if not kinds:
        meanings = _read_gpu_requirements(workers)
        return [pool for pool in pools if _is_hardware_accepted(workers, pool, pools, meanings)]
    selected = list[Pool]()
    for pool in pools:
        members = [labels for labels, _ in kinds if pool.node_selector.items() <= labels.items()]
        # A pool that has no node now is judged by the labels that its nodes will surely have.
        for labels in members or [pool.node_selector]:
            if all(_is_accepted_by_pods(pods, labels, lambda key: True) for pods in workers):
                selected.append(pool)
                break
    return selected


def _read_gpu_requirements(workers: Sequence[Pods]) -> dict[str, dict[str, str]]:
    """Return the GPU to which each required value of a node label refers, by label key and value.

    Only labels of the GPU and of the instance type are included. If no GPU fits a value, its GPU is "". If several GPUs
    fit a value, it is left out.
    """
    table = read_label_table()
    named = dict[str, set[str]]()
    for pods in workers:
        for key, value in pods.node_selector.items():
            named.setdefault(key, set()).add(value)
        for term in pods.affinity:
            for item in term.get("matchExpressions") or ():
                named.setdefault(str(item.get("key")), set()).update(map(str, item.get("values") or ()))
    found = dict[str, dict[str, str]]()
    for key in (*(source.product for source in table.sources), *table.instance_type):
        meanings = {value: _find_gpu_of_label(key, value) for value in sorted(named.get(key, ()))}
        known = {value: gpu for value, gpu in meanings.items() if gpu is not None}
        if known and len(known) == len(meanings):
            found[key] = known
    return found


def _find_gpu_of_label(key: str, value: str) -> str | None:
    """Return the GPU to which the value of a GPU or instance-type label refers, or None if that is unknown."""
    table = read_label_table()
    if key in table.instance_type:
        kind = find_node_type(value)
        return None if kind is None else kind.gpu
    source = next(item for item in table.sources if item.product == key)
    name = source.find_gpu_name(value, None)
    if name is None:
        return None
    try:
        return find_gpu(name).name
    except SpecError:
        # A product that a driver reads from the device, and that no GPU has, is of other hardware.
        return "" if source.is_exact else None


def _is_hardware_accepted(
    workers: Sequence[Pods], pool: Pool, pools: Sequence[Pool], meanings: Mapping[str, Mapping[str, str]]
) -> bool:
    """Return whether a pool without node labels has the GPU and the instance type that pods require.

    Args:
        workers: those pods of a job that have GPUs.
        pool: the pool.
        pools: all pools.
        meanings: result of `_read_gpu_requirements` for `workers`.
    """
    labels = dict[str, str]()
    types = {item.node_type for item in pools if item.node_type}
    for key, gpus in meanings.items():
        # Several instance types may have the same GPU. One that is given by its name is meant alone.
        own = [
            value
            for value, gpu in gpus.items()
            if (pool.node_type == value if value in types and key in read_label_table().instance_type else
                gpu == pool.gpu.name)
        ]  # fmt: skip
        labels[key] = own[0] if own else f"another than {', '.join(gpus)}"
    return all(_is_accepted_by_pods(pods, labels, lambda key: key in labels) for pods in workers)


def build_job_request(request: Request, job: Job, candidates: JobCandidates, *, writes_advice: bool) -> Request:
    """Return a request for advice that is limited to the pools that an existing job may use.

    The baseline of the request is the job's present pool and GPUs.

    Rejected pools are removed from the allowed pools. If the advice will be written into the job, the request keeps the
    job's number of GPUs, unless the job can be resized and the constraints name another number.

    Args:
        request: the request that the user wrote.
        job: the job.
        candidates: the pools that the job may use.
        writes_advice: whether the advice will be written into the job.

    Raises:
        SpecError: every pool that the user allows is rejected.
    """
    limits = request.constraints
    is_open = job.is_resizable and (limits.gpus is not None or limits.max_gpus is not None)
    if writes_advice and job.gpus and not is_open:
        limits = replace(limits, gpus=job.gpus, max_gpus=None, max_nodes=None)
    why = {item.pool: item for item in candidates.rejections}
    if limits.allowed_pools and why.keys() >= set(limits.allowed_pools):
        first = why[limits.allowed_pools[0]]
        raise SpecError("spec.constraints.allowedPools", f"{first.pool}: {first.message}", first.remedy)
    limits = replace(limits, allowed_pools=tuple(name for name in limits.allowed_pools if name not in why))
    return replace(request, name=job.name, constraints=limits, baseline=request.baseline or candidates.baseline)


def order_offers_by_quota(advice: Advice, candidates: JobCandidates) -> Advice:
    """Return the advice with the offers that fit free Kueue quota first, and the rejections of `candidates` added."""
    now, later = list[Offer](), list[Offer]()
    for offer in advice.offers:
        candidate = candidates.find_candidate(offer.pool.name)
        named = _add_met_requests(offer, candidate.device_requests)
        if candidate.flavor is None or candidate.has_room(offer.gpus):
            now.append(named)
        else:
            later.append(replace(named, reason=f"{named.reason}; waits for quota of {candidate.flavor.name}"))
    return replace(advice, offers=(*now, *later), rejections=(*advice.rejections, *candidates.rejections))


def _add_met_requests(offer: Offer, requests: tuple[str, ...]) -> Offer:
    """Return the offer with the names of the ResourceClaim requests that its devices satisfy.

    The names are in a field of the offer and in its reason. If there are no requests, the offer is returned unchanged.
    """
    if not requests:
        return offer
    reason = f"{offer.reason}; meets request {' and '.join(requests)}"[:MAX_REASON]
    return replace(offer, device_requests=requests, reason=reason)


def find_job_placement(offer: Offer, job: Job, candidates: JobCandidates) -> Placement | None:
    """Return the node selector, tolerations and pod count that put an existing job onto an offer's pool.

    The number of GPUs per pod stays unchanged. If whole pods cannot use exactly the GPUs of the offer, or the job
    cannot be resized, return None.
    """
    candidate = candidates.find_candidate(offer.pool.name)
    pods = None
    if offer.gpus != job.gpus:
        if not job.is_resizable or offer.gpus % job.gpus_per_pod:
            return None
        pods = offer.gpus // job.gpus_per_pod
    return Placement(candidate.node_selector, candidate.tolerations, pods)


def find_placement_for_new_job(offer: Offer, job: Job, candidates: JobCandidates) -> Placement:
    """Return the node selector, tolerations and counts that put a job manifest onto an offer's pool.

    The job does not exist in the cluster yet. If plain numbers in the manifest determine the number of pods, the job
    gets one pod per node of the offer, with all of that node's GPUs.
    """
    candidate = candidates.find_candidate(offer.pool.name)
    if not job.is_countable or (offer.gpus == job.gpus and offer.gpus_per_node == job.gpus_per_pod):
        return Placement(candidate.node_selector, candidate.tolerations)
    return Placement(candidate.node_selector, candidate.tolerations, offer.nodes, offer.gpus_per_node)


def _count_nodes_by_labels(
    workers: Sequence[Pods], pools: Sequence[Pool], nodes: Iterable[Labels], queue: LocalQueue | None
) -> list[tuple[Labels, int]]:
    """Return each distinct set of node labels, with the number of nodes that have it.

    A set has only the labels that a pool, a flavor of the queue, or the job's selector or affinity names.
    """
    keys = {key for pool in pools for key in pool.node_selector}
    keys |= {key for flavor in (queue.flavors if queue else ()) for key in flavor.node_labels}
    keys |= {key for pods in workers for key in pods.node_selector}
    for pods in workers:
        keys |= {str(item.get("key")) for term in pods.affinity for item in term.get("matchExpressions") or ()}
    sorted_keys = sorted(keys)
    counted = Counter(tuple((key, labels[key]) for key in sorted_keys if key in labels) for labels in nodes)
    return [(dict(kind), count) for kind, count in sorted(counted.items())]


def _build_claim_rejection(pool: Pool, request: str) -> Rejection:
    """Return the rejection of a pool whose devices do not satisfy a certain ResourceClaim request of the job."""
    message = f"no device that ResourceSlices publish for its nodes meets request {request[:100]}"
    return Rejection(pool.name, "ClaimNotMet", message, "widen the request's selectors, or add an alternative to it")


def _check_pool(
    job: Job, pool: Pool, kinds: Sequence[tuple[Labels, int]], queue: LocalQueue | None, writes_advice: bool
) -> CandidatePool | Rejection:
    """Return a pool reduced to the nodes and GPUs that a job may use, or a rejection if it may use none of them.

    Args:
        job: the job.
        pool: the pool.
        kinds: distinct sets of node labels, each with its number of nodes.
        queue: the job's queue, if Kueue manages it.
        writes_advice: whether the advice will be written into the job.
    """
    if writes_advice and pool.gpus_per_node < job.gpus_per_pod:
        message = f"a pod asks for {job.gpus_per_pod} GPUs, its nodes have {pool.gpus_per_node}"
        return Rejection(pool.name, "PodTooLarge", message, "ask for fewer GPUs in each of more pods")
    if writes_advice and (taint := _find_untolerated_taint(job, pool)):
        message = f"its nodes have taint {taint}, which the job does not tolerate"
        return Rejection(pool.name, "NotTolerated", message, "add the toleration to the job, if it may run there")
    members = [(labels, count) for labels, count in kinds if pool.node_selector.items() <= labels.items()]
    # A pool that has no node now is judged by the labels that its nodes will surely have.
    members = members or [(pool.node_selector, pool.max_nodes)]
    reachable = [(labels, count) for labels, count in members if _is_accepted_by_job(job, labels, writes_advice)]
    if not reachable:
        message = "the job's node selector or affinity excludes its nodes"
        return Rejection(pool.name, "NotSelected", message, "take labels of another kind of node out of the job")
    if queue is None:
        return _limit_pool_to_quota(pool, sum(count for _, count in reachable), None)
    offered = [
        (flavor, nodes)
        for flavor in queue.flavors
        if (nodes := sum(count for labels, count in reachable if _is_selected_by_flavor(flavor, labels)))
    ]
    if not offered:
        message = f"no flavor of ClusterQueue {queue.cluster_queue} selects its nodes"
        return Rejection(pool.name, "NoFlavor", message, "add a ResourceFlavor with their labels to the queue")
    needed = max(job.gpus, 1) if writes_advice else 1
    ample = [item for item in offered if item[0].quota >= needed]
    if not ample:
        most = max(flavor.quota for flavor, _ in offered)
        message = f"LocalQueue {queue.name} can have {most} of its GPUs, the job asks for {needed}"
        return Rejection(pool.name, "QuotaTooSmall", message, "ask for fewer GPUs, or for more quota")
    flavor, nodes = max(ample, key=lambda item: item[0].free >= needed)
    return _limit_pool_to_quota(pool, nodes, flavor)


def _limit_pool_to_quota(pool: Pool, nodes: int, flavor: Flavor | None) -> CandidatePool:
    """Return a pool as a candidate with at most `nodes` nodes. If `flavor` is given, its quota limits the GPUs too."""
    limited = replace(pool, max_nodes=min(pool.max_nodes, nodes))
    if flavor is None:
        return CandidatePool(limited, None, pool.node_selector, pool.tolerations)
    per_node = min(pool.gpus_per_node, flavor.quota)
    limited = replace(limited, gpus_per_node=per_node, max_nodes=min(limited.max_nodes, flavor.quota // per_node))
    # Kueue adds the tolerations of a flavor itself.
    return CandidatePool(limited, flavor, {**pool.node_selector, **flavor.node_labels}, pool.tolerations)


def _is_selected_by_flavor(flavor: Flavor, labels: Labels) -> bool:
    return flavor.node_labels.items() <= labels.items()


def _find_baseline(
    job: Job, pools: Sequence[Pool], kinds: Sequence[tuple[Labels, int]], queue: LocalQueue | None
) -> Baseline | None:
    """Return the pool and GPUs that the job uses without advice, or None if they are not certain.

    The pool is the one that the job's node selector and affinity select. If Kueue manages the job, the flavor that
    Kueue would assign selects it too.
    """
    if not job.gpus:
        return None
    own = [
        labels
        for labels, _ in kinds
        if all(_is_accepted_by_pods(pods, labels, lambda key: True) for pods in job.workers)
    ]
    if queue is not None:
        allowed = replace(
            queue, flavors=tuple(f for f in queue.flavors if any(_is_selected_by_flavor(f, one) for one in own))
        )
        first = allowed.find_first_flavor(job.gpus)
        own = [labels for labels in own if first is not None and _is_selected_by_flavor(first, labels)]
    names = {pool.name for pool in pools for labels in own if pool.node_selector.items() <= labels.items()}
    return Baseline(names.pop(), job.gpus) if len(names) == 1 else None


def _is_accepted_by_job(job: Job, labels: Labels, writes_advice: bool) -> bool:
    """Return whether a node's labels match a job's selectors, except selectors that advice can replace.

    Advice can replace the labels in `node_kind_labels`, except in pinned selectors. If advice will be written into the
    job, it cannot replace the node affinity either.
    """
    return all(
        pods.pinned.items() <= labels.items()
        and _is_accepted_by_pods(pods, labels, lambda key: not is_node_kind_label(key), whole_affinity=writes_advice)
        for pods in job.workers
    )


def _is_accepted_by_pods(
    pods: Pods, labels: Labels, is_checked: Callable[[str], bool], whole_affinity: bool = False
) -> bool:
    """Return whether a node's labels match the node selector and affinity of pods.

    Args:
        pods: the pods.
        labels: labels of the node.
        is_checked: function of a label key that returns whether requirements on that label are checked.
        whole_affinity: whether every requirement of the affinity is checked, even if `is_checked` is false for its
            label key.
    """
    if any(labels.get(key) != value for key, value in pods.node_selector.items() if is_checked(key)):
        return False
    terms = [term.get("matchExpressions") or () for term in pods.affinity]
    return not terms or any(
        all(_is_expression_met(item, labels) for item in term if whole_affinity or is_checked(str(item.get("key"))))
        for term in terms
    )


def _is_expression_met(expression: Mapping[str, Any], labels: Labels) -> bool:
    operator = _OPERATORS.get(str(expression.get("operator")))
    values = [str(value) for value in expression.get("values") or ()]
    return operator is not None and operator(labels.get(str(expression.get("key"))), values)


def _parse_integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.lstrip("-").isdecimal() else None


def _compare_integers(value: str | None, values: list[str], sign: int) -> bool:
    number, bound = _parse_integer(value), _parse_integer(values[0] if values else None)
    return number is not None and bound is not None and sign * number > sign * bound


_OPERATORS: Mapping[str, Callable[[str | None, list[str]], bool]] = {
    "In": lambda value, values: value in values,
    "NotIn": lambda value, values: value not in values,
    "Exists": lambda value, values: value is not None,
    "DoesNotExist": lambda value, values: value is None,
    "Gt": lambda value, values: _compare_integers(value, values, 1),
    "Lt": lambda value, values: _compare_integers(value, values, -1),
}
"""Operators of node selector requirements. Their arguments are a label's value, or None, and the required values."""


def _find_untolerated_taint(job: Job, pool: Pool) -> str:
    """Return text for a taint of the pool that the job does not tolerate, or "" if there is none.

    The usual taint of GPU nodes, nvidia.com/gpu, is ignored.
    """
    for taint in pool.tolerations:
        key, value, effect = taint.get("key", ""), taint.get("value", ""), taint.get("effect", "")
        is_usual = key == gpu_resource()
        if not is_usual and not all(_is_tolerated_by_pods(pods, key, value, effect) for pods in job.workers):
            return f"{key}={value}:{effect}" if value else f"{key}:{effect}"
    return ""


def _is_tolerated_by_pods(pods: Pods, key: str, value: str, effect: str) -> bool:
    return any(
        item.get("key", key) == key
        and (item.get("effect") or effect) == effect
        and (item.get("operator") == "Exists" or (item.get("value") or "") == value)
        for item in pods.tolerations
    )
