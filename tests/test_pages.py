"""Every page in a browser: nothing sticks out, no link is dead, axe-core finds no serious fault, in light and dark."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

from browser import CHROMIUM, DESK, PHONE, open_browser
from conftest import need
from pictures import FIRST_SCREEN, WINDOWS, draw_first_screen, photograph_pages
from tilecast.cli import main

ROOT = Path(__file__).resolve().parent.parent
MIXED = str(ROOT / "examples" / "clusters" / "mixed.yaml")
JOB = str(ROOT / "examples" / "jobs" / "llama-7b-pretrain.yaml")
PRINTED = {
    "report": ["advise", JOB, "--nodes", MIXED, "--baseline", "a100-80:8", "--explain"],
    "scan": ["scan", str(ROOT / "examples" / "scan"), "--nodes", MIXED, "--exit-zero"],
    "queue": ["queue", str(ROOT / "examples" / "queue"), "--gpus", "h100-sxm:16"],
}
"""Commands whose HTML pages are looked at."""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", f"--site-dir={folder}"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class _Page(HTMLParser):
    """What a page links to, and what can be linked to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.names, self.targets = {""}, set[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.names |= {known.get("id") or "", (known.get("name") or "") if tag == "a" else ""}
        self.targets |= {value for key in ("href", "src") if (value := known.get(key))}


@pytest.mark.slow
def test_no_link_of_the_site_is_dead(site: Path) -> None:
    pages = {path.name: _Page(path) for path in site.glob("*.html")}
    assert len(pages) > 20
    dead = []
    for name, page in pages.items():
        for target in page.targets:
            parts = urlsplit(urljoin(f"http://site/{name}", target))
            if parts.netloc != "site" or parts.scheme != "http":
                continue
            path = unquote(parts.path).lstrip("/") or "index.html"
            is_named = path not in pages or unquote(parts.fragment) in pages[path].names
            if not (site / path).is_file() or not is_named:
                dead.append((name, target))
    assert not dead


@pytest.mark.long
@pytest.mark.parametrize(("width", "scheme"), [(DESK, "light"), (PHONE, "dark")])
async def test_every_page_of_the_site_stands_in_a_browser(
    site: Path, address: str, tmp_path: Path, width: int, scheme: str
) -> None:
    faults = {}
    async with open_browser(tmp_path) as browser:
        await browser.set_window(width, scheme)
        for path in sorted(site.glob("*.html")):
            await browser.show(f"{address}/{path.name}")
            ground = "document.body.dataset.mdColorScheme"
            assert await browser.evaluate(ground) == {"light": "default", "dark": "slate"}[scheme]
            if found := await browser.find_faults():
                faults[path.name] = found
    assert not faults


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
async def test_a_page_that_a_command_prints_stands_in_a_browser(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PRINTED[name], "-o", "html"]) == 0
    page = tmp_path / f"{name}.html"
    page.write_text(capsys.readouterr().out, encoding="utf-8")
    faults, grounds = {}, set()
    async with open_browser(tmp_path) as browser:
        for width in (DESK, PHONE):
            for scheme in ("light", "dark"):
                await browser.set_window(width, scheme)
                await browser.show(page.as_uri())
                grounds.add(await browser.evaluate("getComputedStyle(document.body).backgroundColor"))
                if found := await browser.find_faults():
                    faults[width, scheme] = found
    assert not faults
    assert len(grounds) == 2, "light and dark"


@pytest.mark.slow
async def test_faults_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    head = "<!doctype html><html><meta name='viewport' content='width=device-width'><title>bad</title>"
    page.write_text(f"{head}<div style='width:2000px'>wide</div><input><p style='color:#ccc'>pale words")
    async with open_browser(tmp_path) as browser:
        await browser.set_window(PHONE)
        await browser.show(page.as_uri())
        found = " ".join(await browser.find_faults())
    assert all(word in found for word in ("2008 wide", "html-has-lang", "label", "color-contrast")), found


def test_the_first_screen_of_the_documentation_is_todays() -> None:
    assert FIRST_SCREEN.read_text(encoding="utf-8") == draw_first_screen(), "run `make pictures`"


@pytest.mark.slow
def test_the_pictures_of_a_release_are_made_of_every_page(tmp_path: Path) -> None:
    if CHROMIUM is None:
        need("chromium", "no Chromium is installed")
    photograph_pages(tmp_path)
    pictures = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(pictures) == {f"{page}-{window}.png" for page in ("report", "queue") for window in WINDOWS}
    assert len(set(pictures.values())) == len(pictures), "light, dark and phone differ"
