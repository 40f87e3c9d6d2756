"""Release every job that waits for Tilecast: before an uninstall, while the operator is down, or when it is gone.

    python -m tilecast_operator.release [--dry-run] [--policy NAME] [--namespace-selector JSON]
                                        [--if-stale NAMESPACE/NAME [--older-than SECONDS]]

It releases jobs of every kind that the cluster serves, in all namespaces or in those of one shard. Each job gets the
patch that the operator would write: it removes Tilecast from the job's gates, moves a job in the holding queue to its
own queue, or resumes a job that was suspended for Tilecast. A second run does nothing. The credentials are those of the
operator: a pod's, or a kubeconfig's.

With `--if-stale` nothing is released unless the operator's Lease stays unchanged for that time. If the Lease is
renewed, the command ends after a few seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import kopf

from tilecast.jobs import JOB_KINDS
from tilecast.spec import SpecError
from tilecast_operator import recursion
from tilecast_operator.controllers import patches
from tilecast_operator.controllers.job_advice import read_job_leniently
from tilecast_operator.kube import credentials
from tilecast_operator.kube.client import UNREACHABLE, Api, ApiError, list_pages
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.kube.stale_lease import LeaderLivesError, StaleLease
from tilecast_operator.objects.client import client
from tilecast_operator.objects.kinds import KINDS, make_object_path
from tilecast_operator.selector import LabelSelector
from tilecast_operator.settings import check_lease_name

UNINSTALLED = "Uninstalled"
OPERATOR_DOWN = "OperatorDown"
"""Values of `tilecast.dev/applied` on a job that is released here: at an uninstall, or because nobody leads."""
OLDER_THAN_S = 120.0
REQUEST_S = 30.0
PAGE = 500
TRIES = 5
"""Number of attempts of a patch, which fails if somebody else edits the job at the same time."""
PASSES = 4
_ADMISSION = "/apis/admissionregistration.k8s.io"

Printer = Callable[[str], object]


@dataclass(eq=False)
class JobRelease:
    """Release of all jobs that wait for Tilecast.

    Args:
        api: client of the cluster.
        print_line: function that prints one line for each released job and for each error.
        is_dry: whether to only print what would be done.
        selector: selector of the namespaces whose jobs are released, or None for all.
        lease: the Lease that must stay unrenewed, or None if the operator may be alive.
        pause_s: seconds between two passes.
    """

    api: Api
    print_line: Printer
    _: KW_ONLY
    is_dry: bool = False
    selector: LabelSelector | None = None
    lease: StaleLease | None = None
    pause_s: float = 3.0

    def __post_init__(self) -> None:
        self._namespaces = frozenset[str]()
        """Namespaces that the selector selects."""
        self.freed = Counter[str]()
        """Number of released jobs, by kind."""
        self.failed = 0

    async def run(self, policy: str = "") -> None:
        """Release jobs until none waits. Before that, delete the binding of `policy`, if a policy is named.

        Raises:
            LeaderLivesError: the operator is back.
            aiohttp.ClientError, OSError: the API server did not answer.
        """
        if policy:
            await self._delete_binding(policy)
        not_withdrawn = self.failed
        for number in range(PASSES):
            self.failed = not_withdrawn
            if not await self._select_namespaces():
                return
            freed = sum([await self._release_kind(kind) for kind in JOB_KINDS])
            if self.is_dry or not (freed or (policy and number == 0)):
                return
            await asyncio.sleep(self.pause_s)

    async def _select_namespaces(self) -> bool:
        """Store the names of the namespaces that the selector selects. Return False if they cannot be listed."""
        if self.selector is None:
            return True
        try:
            items = [item async for item in self._list_objects("Namespace")]
        except ApiError as error:
            self._report_failure(f"namespaces cannot be listed: {error}")
            return False
        labels = {item["metadata"]["name"]: item["metadata"].get("labels") or {} for item in items}
        self._namespaces = frozenset(name for name, given in labels.items() if self.selector.selects(given))
        return True

    async def _release_kind(self, kind: str) -> int:
        """Release all waiting jobs of a kind, and return their number. A dry run only counts them."""
        freed = 0
        try:
            async for document in self._list_objects(kind):
                if self.selector is None or document["metadata"]["namespace"] in self._namespaces:
                    freed += await self._release_job(kind, document)
        except ApiError as error:
            if error.status != 404:
                self._report_failure(f"{KINDS[kind].plural} cannot be listed: {error}")
        return freed

    async def _list_objects(self, kind: str) -> AsyncIterator[Document]:
        async for page in list_pages(self.api, KINDS[kind].path(), {}, PAGE):
            for item in page.get("items") or ():
                yield {**item, "apiVersion": KINDS[kind].api_version, "kind": kind}

    async def _release_job(self, kind: str, document: Document) -> bool:
        """Release a job if it waits for Tilecast. Return whether it was released, or would be in a dry run."""
        key = Key.from_object({**document, "kind": kind})
        name = f"{kind} {key.namespace}/{key.name}"
        try:
            for _ in range(TRIES):
                job = read_job_leniently(document)
                outcome = UNINSTALLED if self.lease is None else OPERATOR_DOWN
                operations = patches.make_release_patch(document, job, outcome)
                if job.is_owned or not operations:
                    return False
                if self.is_dry:
                    break
                if self.lease is not None:
                    await self.lease.require_unchanged()
                try:
                    await self.api.patch(make_object_path(key), operations)
                    break
                except ApiError as error:
                    if error.status != 409:
                        raise
                document = await self.api.get(make_object_path(key))
            else:
                raise ApiError(409, "it is edited all the time")
        except ApiError as error:
            if error.status != 404:
                self._report_failure(f"{name} was not let go: {error}")
            return False
        except SpecError as error:
            self._report_failure(f"{name} cannot be read: {error}")
            return False
        self.print_line(f"{name} {'would be' if self.is_dry else 'was'} let go")
        self.freed[kind] += 1
        return True

    async def _delete_binding(self, policy: str) -> None:
        """Delete the binding of a MutatingAdmissionPolicy."""
        for version in ("v1", "v1beta1"):
            path = f"{_ADMISSION}/{version}/mutatingadmissionpolicybindings/{policy}"
            try:
                metadata = (await self.api.get(path))["metadata"]
                if not self.is_dry:
                    await self.api.delete(path, str(metadata["uid"]), str(metadata["resourceVersion"]))
            except ApiError as error:
                if error.status != 404:
                    self._report_failure(f"policy binding {policy} was not deleted: {error}")
                continue
            self.print_line(f"policy binding {policy} {'would be' if self.is_dry else 'was'} deleted")
            return

    def _report_failure(self, text: str) -> None:
        self.failed += 1
        self.print_line(f"error: {text}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line that the module's docstring describes."""
    options = _build_parser().parse_args(arguments)
    try:
        selector = LabelSelector.from_json(options.namespace_selector, "--namespace-selector")
        place = check_lease_name(options.if_stale, "--if-stale")
    except SpecError as error:
        return _print_error(str(error))
    recursion.set_recursion_limit()
    kwargs: dict[str, Any] = {"settings": kopf.OperatorSettings(), "logger": logging.getLogger("tilecast")}

    async def release() -> JobRelease:
        api = client(REQUEST_S)
        lease = StaleLease(api, place) if place else None
        work = JobRelease(api, print, is_dry=options.dry_run, selector=selector, lease=lease)
        try:
            api.log_in(lambda: credentials.to_connection(credentials.read_credentials(kwargs)))
            if lease is not None:
                await lease.wait_until_stale(options.older_than)
            await work.run(options.policy)
        except LeaderLivesError as error:
            print(error)  # noqa: T201
        finally:
            await api.close()
        return work

    try:
        done = asyncio.run(release())
    except kopf.LoginError as error:
        return _print_error(f"no credentials: {error}; run it in the cluster, or set KUBECONFIG")
    except (ApiError, *UNREACHABLE) as error:
        return _print_error(f"the API server does not answer: {str(error) or type(error).__name__}; look at KUBECONFIG")
    many = sum(done.freed.values())
    print(f"{many} {'job' if many == 1 else 'jobs'} {'would be' if options.dry_run else 'were'} let go")  # noqa: T201
    return 1 if done.failed else 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tilecast_operator.release", description="Let every job go that waits for Tilecast."
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be let go, and change nothing")
    parser.add_argument("--policy", default="", metavar="NAME", help="delete this MutatingAdmissionPolicyBinding first")
    parser.add_argument(
        "--namespace-selector", default="", metavar="JSON", help="LabelSelector of the namespaces; all without it"
    )
    parser.add_argument(
        "--if-stale", default="", metavar="NAMESPACE/NAME", help="only if nobody renews this Lease of the operator"
    )
    parser.add_argument(
        "--older-than", type=float, default=OLDER_THAN_S, metavar="SECONDS",
        help="how long nobody may have renewed it; default: %(default)g",
    )  # fmt: skip
    return parser


def _print_error(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)  # noqa: T201
    return 2


if __name__ == "__main__":
    sys.exit(main())
