"""The report: one self-contained file, rendered by a browser."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from conftest import need
from pictures import find_chromium
from tilecast.cli import main

ROOT = Path(__file__).resolve().parent.parent
JOB = str(ROOT / "examples" / "jobs" / "llama-7b-pretrain.yaml")
MIXED = str(ROOT / "examples" / "clusters" / "mixed.yaml")
CHROMIUM = find_chromium()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    with pytest.MonkeyPatch.context() as patch, path.open("w", encoding="utf-8") as out:
        patch.setattr("sys.stdout", out)
        assert main(["advise", JOB, "--nodes", MIXED, "--baseline", "a100-80:8", "-o", "html"]) == 0
    return path


class _Tags(HTMLParser):
    """Parser that checks that tags nest, and collects them with their attributes."""

    VOID = ("meta", "link", "br", "circle", "path", "line", "polyline", "polygon")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags(path: Path) -> list[tuple[str, dict[str, str | None]]]:
    reader = _Tags()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    assert reader.open == []
    return reader.seen


def test_the_page_is_whole_and_needs_nothing_else(report: Path) -> None:
    seen = tags(report)
    assert not [tag for tag, _ in seen if tag in ("script", "img", "iframe", "object", "video", "form")]
    named = [value for _, attributes in seen for key in ("src", "href") if (value := attributes.get(key))]
    assert named == ["data:,"]
    assert "url(" not in report.read_text() and "@import" not in report.read_text()
    identifiers = [value for _, attributes in seen if (value := attributes.get("id"))]
    assert len(set(identifiers)) == len(identifiers)


def test_the_page_can_be_read_without_seeing_it(report: Path) -> None:
    seen = tags(report)
    pictures = [attributes for tag, attributes in seen if tag == "svg"]
    assert len(pictures) == 4  # the Pareto set, two scaling curves, the roofline
    identifiers = {attributes.get("id") for _, attributes in seen}
    assert all(picture["role"] == "img" and picture["aria-labelledby"] in identifiers for picture in pictures)
    tables = [tag for tag, _ in seen if tag == "table"]
    assert len([tag for tag, _ in seen if tag == "caption"]) == len(tables) >= 4
    assert all(attributes.get("scope") in ("col", "row") for tag, attributes in seen if tag == "th")
    assert ("html", {"lang": "en"}) in seen
    headings = [tag for tag, _ in seen if tag in ("h1", "h2", "h3")]
    assert headings[0] == "h1" and headings.count("h1") == 1


def test_dimensions_are_named_in_words(report: Path) -> None:
    text = report.read_text()
    assert "<td>ZeRO stage" in text and "zeroStage" not in text


def test_names_that_look_like_markup_stay_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(Path(JOB).read_text().replace("name: llama-7b-pretrain", "name: '<script>alert(1)</script>'"))
    assert main(["advise", str(job), "--nodes", MIXED, "-o", "html"]) == 0
    page = capsys.readouterr().out
    assert "<script" not in page and "&lt;script&gt;" in page


def test_no_recommendation_is_a_page_too(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["advise", "llama-3.1-405b", "--seq", "8192", "--batch", "64", "--gpus", "t4:8", "-o", "html"]
    assert main(arguments) == 3
    page = capsys.readouterr().out
    assert "No pool can run this job" in page and page.endswith("</html>\n")


def chromium(folder: Path, page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    if CHROMIUM is None:
        need("chromium", "no Chromium is installed")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
               "--disable-background-networking", "--disable-component-update", "--disable-sync",
               f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--v=0", *flags,
               page.as_uri()]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


PROBE = """<script>
addEventListener("load", () => {
  const texts = [...document.querySelectorAll("svg text, td, th, h1, h2, p, dd")];
  const wide = document.documentElement.scrollWidth > innerWidth;
  const far = texts.filter(t => t.closest("svg")).filter(t => {
    const own = t.getBoundingClientRect(), svg = t.closest("svg").getBoundingClientRect();
    return own.left < svg.left - 1 || own.right > svg.right + 1 || own.bottom > svg.bottom + 1;
  }).map(t => t.textContent);
  const ground = getComputedStyle(document.body).backgroundColor, ink = getComputedStyle(document.body).color;
  document.title = JSON.stringify({wide, far, ground, ink, text: document.body.innerText.length});
});
</script>"""


def stays_inside(page: Path, folder: Path, width: int) -> None:
    """Check that nothing overflows a window of that width, and no text overflows its picture."""
    probed = folder / "probed.html"
    probed.write_text(page.read_text().replace("</body>", f"{PROBE}</body>"))
    done = chromium(folder, probed, "--dump-dom", f"--window-size={width},900")
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title is not None, done.stderr
    assert '"wide":false' in title[1] and '"far":[]' in title[1], title[1]


@pytest.mark.slow
def test_a_browser_shows_it_without_a_word_on_its_console(report: Path, tmp_path: Path) -> None:
    done = chromium(tmp_path, report, "--dump-dom")
    text = re.sub(r"<style>.*?</style>", "", done.stdout, flags=re.DOTALL)
    text = re.sub(r"<[^>]+>", " ", text)
    for words in (
        "llama-7b-pretrain",
        "h100-sxm, 2 x 8 GPUs",
        "zero1-dp16,mb1",
        "your baseline",
        "no BF16 units: train in fp16",
        "Step time of the fastest plan by GPUs, with the 90 % range",
        "(roofline): 989TFLOP/s in bf16",
        "your plan today",
        "recommended",
        "ideal on h100-sxm",
        "Made by `tilecast advise",
        "attention.gradient",
        "activations",
        "How sure?",
    ):
        assert words in text, words
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.slow
def test_nothing_runs_out_of_the_window_and_words_stay_in_their_pictures(
    report: Path, tmp_path: Path, width: int
) -> None:
    stays_inside(report, tmp_path, width)


@pytest.mark.slow
def test_light_and_dark_differ_and_are_legible(report: Path, tmp_path: Path) -> None:
    probed = tmp_path / "probed.html"
    probed.write_text(report.read_text().replace("</body>", f"{PROBE}</body>"))
    backgrounds = {}
    for scheme, code in (("light", 1), ("dark", 0)):
        flags = ("--dump-dom", f"--blink-settings=preferredColorScheme={code}")
        title = re.search(r"<title>(\{.*?\})</title>", chromium(tmp_path / scheme, probed, *flags).stdout)
        assert title is not None
        colors = re.findall(r"rgb\((\d+), (\d+), (\d+)\)", title[1])
        ground, ink = (_luminance(color) for color in colors)
        backgrounds[scheme] = ground
        assert (max(ground, ink) + 0.05) / (min(ground, ink) + 0.05) > 7  # WCAG 2.2, contrast (enhanced)
    assert backgrounds["light"] > 0.8 > 0.1 > backgrounds["dark"]


def _luminance(color: tuple[str, ...]) -> float:
    """Return the relative luminance of a color, after WCAG 2.2."""
    parts = [int(value) / 255 for value in color]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
