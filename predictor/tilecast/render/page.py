"""Build HTML pages that need no network and no script, and follow the light or dark mode of the browser."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tilecast.render import charts

STYLE = """\
:root{color-scheme:light dark;--page:#fbfbfa;--ink:#1c2024;--soft:#5c6670;--line:#dde1e6;--card:#fff;--good:#00735a;
--bad:#b3480a;--bar:#0063a8}
@media(prefers-color-scheme:dark){:root{--page:#14171a;--ink:#e8eaed;--soft:#a2acb8;--line:#343a42;--card:#1c2024;
--good:#4fc9a8;--bad:#f29a5c;--bar:#5cb3f2}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1160px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:26px;line-height:1.2;margin:0 0 4px}h2{font-size:18px;margin:40px 0 10px}
p{margin:6px 0}.soft,caption,figcaption{color:var(--soft)}
.card{background:var(--card);border:1px solid var(--line);border-left:4px solid var(--good);border-radius:8px;
padding:16px 20px;margin:20px 0}
.card strong{font-size:20px}
dl.facts{display:flex;flex-wrap:wrap;gap:8px 32px;margin:12px 0 0}dl.facts div{min-width:90px}
dt{color:var(--soft);font-size:13px}dd{margin:0;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;background:var(--card);
border:1px solid var(--line)}
caption{text-align:left;padding:0 0 6px;font-size:13px}
th,td{text-align:left;padding:6px 12px;border-bottom:1px solid var(--line);white-space:nowrap;vertical-align:top}
td.wrap{white-space:normal;min-width:260px}
thead th{font-size:13px;color:var(--soft);font-weight:600}
th[scope=row]{font-weight:600}
.n{text-align:right}tr.best{background:color-mix(in srgb,var(--good) 12%,transparent)}
tr.off{background:color-mix(in srgb,var(--bad) 14%,transparent)}tr.out td,tr.out th{color:var(--soft)}
.meter{display:inline-block;height:10px;background:var(--bar);border-radius:2px;vertical-align:middle;min-width:1px}
code,pre{font:13px ui-monospace,monospace}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(380px,100%),1fr));gap:24px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px}
figcaption{font-size:13px;padding:0 4px 8px}figure.wide{max-width:760px}main>figure{margin-bottom:20px}
@media(max-width:600px){figure .scroll>.chart{max-width:none;width:560px}}
details{margin:8px 0}summary{color:var(--soft);cursor:pointer}
footer{margin-top:48px;font-size:13px;color:var(--soft)}
"""
"""CSS of a page."""


def html_page(title: str, body: Sequence[str], style: str = "") -> str:
    """Return a complete HTML page. `body` holds its elements as markup, of which empty strings are left out.

    `style` is CSS to add to that of every page.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
        f"<style>\n{STYLE}{charts.STYLE}{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def definition_list(named: Sequence[tuple[str, str]]) -> str:
    """Return an HTML `<dl>` of (name, value) pairs. Pairs with an empty value are left out."""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in named if value)
    return f'<dl class="facts">{items}</dl>'


def html_table(
    caption: str, titles: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], figures: str = ""
) -> str:
    """Return an HTML table in a scrollable container.

    Args:
        caption: caption of the table, as text.
        titles: titles of the columns, as text. Only a column titled "why" wraps its text.
        rows: CSS class and cells of each row, as markup. The first cell is the row's header.
        figures: titles of the numeric columns, separated by `|`. Numbers are aligned to the right.
    """
    right = [title in figures.split("|") for title in titles]
    head = "".join(
        f'<th scope="col"{class_attribute("n" if is_right else "")}>{escape(title)}</th>'
        for title, is_right in zip(titles, right, strict=True)
    )
    lines = []
    for kind, cells in rows:
        row = [f'<th scope="row">{cells[0]}</th>']
        for cell, is_right, title in zip(cells[1:], right[1:], titles[1:], strict=True):
            row.append(f"<td{class_attribute('n' if is_right else 'wrap' if title == 'why' else '')}>{cell}</td>")
        lines.append(f"<tr{class_attribute(kind)}>{''.join(row)}</tr>")
    inside = f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll" tabindex="0"><table>{inside}</table></div>'


def class_attribute(name: str) -> str:
    """Return an HTML `class` attribute with a leading space. For an empty name, return an empty string."""
    return f' class="{name}"' if name else ""


def html_figure(title: str, picture: str, kind: str = "") -> str:
    """Return an HTML `<figure>` with a caption above an `<svg>` element. `kind` is its CSS class.

    On a narrow screen the picture keeps its size, so that its text stays readable, and can be scrolled.
    """
    scrolled = f'<div class="scroll" tabindex="0">{picture}</div>'
    return f"<figure{class_attribute(kind)}><figcaption>{escape(title)}</figcaption>{scrolled}</figure>"


def fraction_bar(fraction: float) -> str:
    """Return an HTML bar whose length shows a number from 0 to 1."""
    return f'<span class="meter" style="width:{max(fraction, 0.0) * 160:.0f}px"></span>'
