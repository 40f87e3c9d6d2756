"""Forward reports that reach another replica to the leader, with their tokens."""

from __future__ import annotations

import hmac
import ssl
from pathlib import Path

import aiohttp
from aiohttp import web

from tilecast_operator.kube.client import UNREACHABLE
from tilecast_operator.kube.lease import Election, Leadership
from tilecast_operator.observed.reports import RefusedReport

RELAYED = "Tilecast-Relayed"
"""Header of a forwarded report with the leader's name in the Lease. Such a report is not forwarded again."""
CLIENT = "Tilecast-Client"
"""Header of a forwarded report with the address of the original sender."""
TIMEOUT_S = 15.0


class ReportForwarder:
    """Client that forwards reports to the leading replica. Belongs to one event loop.

    Args:
        leadership: leadership of this replica.
        election: election that knows the leader's address, or None if there is only one replica.
        certificate: file of the certificate that all replicas serve, empty without TLS.
    """

    def __init__(self, leadership: Leadership, election: Election | None, certificate: str = "") -> None:
        self._leadership = leadership
        self._election = election
        self._certificate = certificate
        self._session: aiohttp.ClientSession | None = None
        self._tls: tuple[int, str, ssl.SSLContext] | None = None
        """Time (ns) and text of the certificate's file, and the TLS context that trusts it."""

    def find_client_address(self, request: web.Request) -> str:
        """Return the IP address of the client that sent a report, even if another replica forwarded it.

        A replica that forwards a report adds a header with the client's address. The header is trusted only if another
        header has this replica's name from the Lease. Clients cannot read the Lease, so no client can claim several
        addresses.
        """
        named = request.headers.get(RELAYED, "").encode(errors="replace")
        is_relayed = self._election is not None and hmac.compare_digest(named, self._election.identity.encode())
        return (request.headers.get(CLIENT) if is_relayed else request.remote) or ""

    async def forward_report(self, request: web.Request, body: bytes) -> web.Response | None:
        """Forward a report to the leader and return its response. If this replica leads, return None.

        Raises:
            RefusedReport: nobody leads, or the leader does not answer.
        """
        if self._leadership.is_leader:
            return None
        address = None if self._election is None else self._election.leader_address
        if address is None or RELAYED in request.headers:
            raise RefusedReport("unavailable", 503, "no replica leads now; report again later")
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        headers = {"Authorization": request.headers.get("Authorization", "")}
        headers |= {RELAYED: "" if self._election is None else self._election.leader, CLIENT: request.remote or ""}
        try:
            url, tls = f"{address}{request.rel_url.raw_path}", self._find_leader_tls()
            async with self._session.put(url, data=body, headers=headers, ssl=tls) as answer:
                text = await answer.text()
                later = {name: answer.headers[name] for name in ("Retry-After",) if name in answer.headers}
                return web.Response(text=text, status=answer.status, content_type=answer.content_type, headers=later)
        except (*UNREACHABLE, ssl.SSLError):
            raise RefusedReport(
                "unavailable", 503, "the replica that leads does not answer; report again later"
            ) from None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def _find_leader_tls(self) -> ssl.SSLContext | bool:
        """Return a TLS context that trusts the current and the previous certificate.

        All requests share one context, because a connection is only reused by requests with the same context.
        """
        if not self._certificate:
            return True
        path = Path(self._certificate)
        written_ns = path.stat().st_mtime_ns
        if self._tls is None or self._tls[0] != written_ns:
            chain, before = path.read_text(), "" if self._tls is None else self._tls[1]
            self._tls = written_ns, chain, _make_tls_context(chain, before)
        return self._tls[2]


def _make_tls_context(*pem_chains: str) -> ssl.SSLContext:
    """Return a TLS context that trusts exactly the first certificate of each PEM chain, for any host name.

    All replicas serve the first certificate, because they mount one Secret. The other certificates of a chain belong to
    authorities, which also sign certificates of other servers.
    """
    first = ["".join(chain.partition("-----END CERTIFICATE-----")[:2]) for chain in pem_chains if chain]
    context = ssl.create_default_context(cadata="\n".join(first))
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context
