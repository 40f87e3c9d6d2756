"""The server: IPv4 and IPv6, TLS, limits, and requests refused before they cost anything."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bearer_tokens import NOW_S, token
from operator_store import Store
from tilecast.spec import SpecError
from tilecast_operator import report_guard, server
from tilecast_operator.controllers import token_reviews
from tilecast_operator.controllers.token_reviews import TokenReviewer
from tilecast_operator.metrics import Metrics
from tilecast_operator.observed.reports import RefusedReport
from tilecast_operator.report_guard import ReportGuard

TRUE = "true"


def guard(
    rate: float = 10.0, refused: list[str] | None = None, ticks: list[float] | None = None, max_clients: int = 4096
) -> ReportGuard:
    now = ticks if ticks is not None else [0.0]
    return ReportGuard(rate, lambda: NOW_S, ([] if refused is None else refused).append, lambda: now[0], max_clients)


async def ignore(*_: object) -> None:
    """Take a report."""


@asynccontextmanager
async def served(
    address: server.ListenAddress, admit: server.AdmitReport | None = None, take: server.ScoreReport = ignore
) -> AsyncIterator[server.HttpServer]:
    running = await server.start_server(
        address, Metrics().registry, lambda: None, lambda: None, admit or guard().admit_report, take
    )
    try:
        yield running
    finally:
        await running.cleanup()


async def test_one_port_answers_both_families() -> None:
    async with served(server.ListenAddress("::", 0)) as running, aiohttp.ClientSession() as session:
        for host in ("127.0.0.1", "[::1]"):
            async with session.get(f"http://{host}:{running.port}/healthz") as answer:
                assert answer.status == 200


async def test_a_connection_without_a_request_is_closed_and_one_with_is_not() -> None:
    async with served(server.ListenAddress("127.0.0.1", 0, limits=server.ClientLimits(request_s=0.3))) as running:
        silent = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(50)]
        silent[0][1].write(b"GET /healthz HTTP/1.1\r\nHost: a\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        async with asyncio.timeout(5):
            for quiet, _ in silent:
                assert await quiet.read() == b"" or quiet.at_eof()
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200" in await reader.readuntil(b"200")
        for _, open_writer in [*silent, (reader, writer)]:
            open_writer.close()


async def test_connections_are_bounded_and_those_that_do_nothing_shut_nobody_out() -> None:
    limits = server.ClientLimits(connections=4, closed_at_once=2)
    ask = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
    async with served(server.ListenAddress("127.0.0.1", 0, limits=limits)) as running, asyncio.timeout(20):
        held = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(4)]
        for reader, writer in held[::-1]:
            writer.write(ask)
            await reader.readuntil(b"ok")
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(ask)
            assert b"200 OK" in await reader.readuntil(b"ok")
            held.append((reader, writer))
        assert [await held[number][0].read() for number in (3, 2)] == [b"", b""], "used longest ago"
        held[-1][1].write(ask)
        await held[-1][0].readuntil(b"ok")
        for _, open_writer in held:
            open_writer.close()


async def test_no_connection_whose_request_is_under_way_is_closed() -> None:
    address = server.ListenAddress("127.0.0.1", 0, limits=server.ClientLimits(connections=2))
    answer = asyncio.Event()

    async def slowly(*_: object) -> None:
        await answer.wait()

    put = b"PUT /observations/team/a HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"
    async with served(address, lambda *_: nullcontext(), slowly) as running, asyncio.timeout(20):
        busy = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(2)]
        for _, writer in busy:
            writer.write(put)
        await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        assert await reader.read() == b"", "there is no room"
        answer.set()
        for reader, _ in busy:
            assert b"202" in await reader.readuntil(b"accepted")
        for _, open_writer in [*busy, (reader, writer)]:
            open_writer.close()


def certificate(folder: Path, name: str) -> None:
    """Write a self-signed certificate for a name, in the files of a mounted Secret."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", f"/CN={name}", "-keyout", folder / "tls.key", "-out", folder / "tls.crt"],
        check=True, capture_output=True,
    )  # fmt: skip


async def test_a_renewed_certificate_is_served(tmp_path: Path) -> None:
    limits = server.ClientLimits(renew_s=0.05, served_after_s=0.5)
    files = str(tmp_path / "tls.crt"), str(tmp_path / "tls.key")
    with pytest.raises(SpecError, match="TILECAST_TLS_CERTIFICATE: the certificate cannot be read"):
        async with served(server.ListenAddress("127.0.0.1", 0, *files)):
            pass
    certificate(tmp_path, "first")

    async def shown(port: int) -> bytes:
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
        shown_value: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return shown_value

    async with served(server.ListenAddress("127.0.0.1", 0, *files, limits)) as running:
        first = await shown(running.port)
        (tmp_path / "tls.key").write_text("half of a key")
        await asyncio.sleep(0.2)
        assert await shown(running.port) == first, "what cannot be read replaces nothing"
        renewed_at = time.monotonic()
        certificate(tmp_path, "second")
        os.utime(tmp_path / "tls.key")
        await asyncio.sleep(0.2)
        is_first = await shown(running.port) == first
        assert is_first or time.monotonic() - renewed_at > limits.served_after_s, (
            "the other replica may not have it yet"
        )
        async with asyncio.timeout(30):
            while await shown(running.port) == first:
                await asyncio.sleep(0.05)


def test_tokens_that_cannot_be_ours_are_refused_without_asking() -> None:
    report_guard.require_token(token(), "team", NOW_S)
    report_guard.require_token(token(aud="tilecast"), "team", NOW_S)
    for wrong, outcome in (
        ("", "unauthenticated"),
        ("abc", "unauthenticated"),
        ("a.b.c", "unauthenticated"),
        ("a.W10.c", "unauthenticated"),
        (token() + "x" * 10_000, "unauthenticated"),
        (token(aud=["https://kubernetes.default.svc"]), "unauthenticated"),
        (token(aud={}), "unauthenticated"),
        (token(exp=NOW_S - 3600), "unauthenticated"),
        (token(exp="never"), "unauthenticated"),
        (token(nbf=NOW_S + 3600), "unauthenticated"),
        (token("other"), "forbidden"),
        (token("team2"), "forbidden"),
        (token(sub=None), "forbidden"),
    ):
        with pytest.raises(RefusedReport) as caught:
            report_guard.require_token(wrong, "team", NOW_S)
        assert caught.value.outcome == outcome, wrong


def test_a_client_that_floods_is_limited_alone() -> None:
    refused: list[str] = []
    ticks = [0.0]
    limits = guard(2.0, refused, ticks)

    def reports(address: str, count: int) -> int:
        accepted = 0
        for _ in range(count):
            try:
                with limits.admit_report(address, "team", token()):
                    accepted += 1
            except RefusedReport as refusal:
                assert (refusal.status, refusal.retry_after_s) == (429, 1)
        return accepted

    assert reports("10.0.0.1", 1000) == 20, "a burst of ten seconds"
    assert reports("10.0.0.2", 10) == 10, "others are served"
    assert reports("2001:db8::1", 15) + reports("2001:db8::ffff", 15) == 20, "one host has many addresses"
    assert reports("::ffff:10.0.0.2", 20) == 10, "and may come by either family"
    ticks[0] += 3.0
    assert reports("10.0.0.1", 1000) == 6
    assert set(refused) == {"limited"}
    ticks[0] += 1e6
    for number in range(10_000):
        assert reports(f"10.1.{number // 250}.{number % 250}", 1) == 1
    assert len(limits._left) <= 4096, "what is kept of clients is bounded"


def test_reports_of_one_client_at_a_time_are_bounded() -> None:
    limits, open_reports = guard(100.0), []
    for _ in range(report_guard.MAX_IN_FLIGHT):
        report = limits.admit_report("10.0.0.1", "team", token())
        report.__enter__()
        open_reports.append(report)
    with pytest.raises(RefusedReport, match="too many"), limits.admit_report("10.0.0.1", "team", token()):
        pass
    open_reports[0].__exit__(None, None, None)
    with limits.admit_report("10.0.0.1", "team", token()):
        pass


async def test_a_limited_client_is_asked_to_wait() -> None:
    async with (
        served(server.ListenAddress("127.0.0.1", 0), guard(0.1).admit_report) as running,
        aiohttp.ClientSession() as session,
    ):
        url = f"http://127.0.0.1:{running.port}/observations/team/a"
        headers = {"Authorization": f"Bearer {token()}"}
        async with session.put(url, data=b"{}", headers=headers) as answer:
            assert answer.status == 202
        async with session.put(url, data=b"{}", headers=headers) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, "10")
            assert (await answer.json())["outcome"] == "limited"


class Reviewer(Store):
    """Counts token reviews, and how many run at once."""

    asked = 0
    delay_s = 0.0
    at_once = 0
    most_at_once = 0

    async def create(self, path: str, document: Any, **options: Any) -> dict[str, Any]:
        self.asked += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.delay_s)
        self.at_once -= 1
        return {"status": {"authenticated": document["spec"]["token"].endswith(TRUE)}}


async def test_forged_tokens_are_asked_about_once_and_push_out_no_true_one() -> None:
    store = Reviewer()
    reviews = TokenReviewer(store, cache_s=60.0)
    await reviews.review_token(TRUE)
    for number in range(5000):
        await reviews.review_token(f"forged-{number}")
    assert store.asked == 5001
    await reviews.review_token("forged-4999")
    await reviews.review_token(TRUE)
    assert store.asked == 5001


@pytest.mark.slow
async def test_a_flood_of_tokens_keeps_nobody_out_who_reported_before() -> None:
    """Hundreds of clients send tokens that could be ours, while one client's token is due for another review."""
    store, forged_answers, answers = Reviewer(), Counter[int | None](), list[int | None]()
    reviews, guarding = TokenReviewer(store, cache_s=0.0), guard(rate=2.0, max_clients=64)

    async def take(namespace: str, name: str, sent: str, body: bytes) -> None:
        if not (await reviews.review_token(sent))["status"]["authenticated"]:
            raise RefusedReport("unauthenticated", 401, "the token is nobody's")

    async def put(session: aiohttp.ClientSession, port: int, sent: str) -> int | None:
        """Return the status of the answer, or None where the connection was one too many and was closed."""
        url, headers = f"http://127.0.0.1:{port}/observations/team/a", {"Authorization": f"Bearer {sent}"}
        try:
            async with session.put(url, headers=headers) as answer:
                assert answer.status not in (429, 503) or answer.headers["Retry-After"]
                return answer.status
        except aiohttp.ClientConnectionError:
            return None

    async def flood(port: int, number: int) -> None:
        connector = aiohttp.TCPConnector(local_addr=(f"127.0.{1 + number // 200}.{1 + number % 200}", 0))
        patient = aiohttp.ClientTimeout(total=None, sock_connect=None)
        async with aiohttp.ClientSession(connector=connector, timeout=patient) as session:
            sent = [token(signature=f"forged-{number}-{part}") for part in range(30)]
            forged_answers.update(await asyncio.gather(*(put(session, port, one) for one in sent)))

    honest = token(signature=TRUE)
    async with (
        asyncio.timeout(120),
        served(server.ListenAddress("127.0.0.1", 0), guarding.admit_report, take) as running,
        aiohttp.ClientSession() as session,
    ):
        answers.append(await put(session, running.port, honest))
        store.delay_s = 0.05
        floods = [asyncio.create_task(flood(running.port, number)) for number in range(100)]
        for _ in range(10):
            await asyncio.sleep(0.02)
            answers.append(await put(session, running.port, honest))
        await asyncio.gather(*floods)
    assert answers == [202] * 11
    assert store.most_at_once <= token_reviews.MAX_REVIEWING and set(forged_answers) - {None} == {401, 429, 503}
    assert store.asked < sum(forged_answers.values()) / 2, "few of them reach the API server"
