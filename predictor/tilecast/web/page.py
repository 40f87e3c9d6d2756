"""Write the page with the form. It also works without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from html import escape

from tilecast import hardware
from tilecast.inputs.job_options import JOB_OPTIONS
from tilecast.render import charts
from tilecast.render.page import STYLE
from tilecast.web.answers import DEFAULTS, LABELS, MAIN_OPTIONS, MORE_OPTIONS, Form
from tilecast.zoo import presets

EXAMPLE = Form(model="llama-3.1-8b", gpus="h100-sxm:16,a100-80:16", seq="8192", batch="128")
"""Values of the form on the first visit."""
_OWN_STYLE = """\
form,.more{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:12px 20px;margin:20px 0}
label{display:block;font-size:13px;color:var(--soft)}
input,select,textarea{width:100%;padding:7px 9px;border:1px solid var(--line);border-radius:6px;background:var(--card);
color:var(--ink);font:15px/1.3 system-ui,sans-serif}
textarea{min-height:64px;font:13px ui-monospace,monospace}
.whole{grid-column:1/-1}
.more{margin:12px 0 0}
button{padding:8px 16px;border:1px solid var(--good);border-radius:6px;background:var(--card);color:var(--good);
font:600 15px system-ui,sans-serif;cursor:pointer}
:focus-visible{outline:2px solid var(--bar);outline-offset:2px}
.error{border-left-color:var(--bad)}
"""


def write_page(form: Form, answer: str = "", header: str = "") -> str:
    """Return the page with a form's values, a header and an answer below the form as HTML."""
    fields = [
        _write_input("model", form.model, sorted({model.name for model in presets().values()})),
        _write_input("gpus", form.gpus, sorted(hardware.list_gpus())),
        *(_write_option(form, name) for name in MAIN_OPTIONS),
        f'<label class="whole">{escape(LABELS["pasted"])}'
        f'<textarea name="pasted" spellcheck="false">{escape(form.pasted)}</textarea></label>',
        f'<label class="whole">{escape(LABELS["file"])}'
        f'<textarea name="file" spellcheck="false">{escape(form.file)}</textarea></label>',
        f'<details class="whole"{" open" * any(getattr(form, name) for name in MORE_OPTIONS)}>'
        '<summary>More: length of the run, LoRA, optimizer, limits</summary><div class="more">',
        *(_write_option(form, name) for name in MORE_OPTIONS),
        "</div></details>",
        '<div class="whole"><button type="submit">Forecast</button> <span id="state" role="status"></span></div>',
    ]
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        '<link rel="icon" href="data:,">',
        "<title>Tilecast</title>",
        '<link rel="stylesheet" href="page.css">',
        '<script src="page.js" defer></script>',
        "</head>",
        "<body>",
        "<main>",
        *([header] if header else []),
        "<h1>Tilecast</h1>",
        '<p class="soft">Which GPU pool, how many GPUs and which plan, how long and at what cost: a forecast.</p>',
        '<form method="post" action="." id="job">',
        *fields,
        "</form>",
        f'<section id="answer" aria-live="polite">{answer}</section>',
        "</main>",
        "</body>",
        "</html>",
        "",
    ]
    return "\n".join(lines)


def write_error(text: str) -> str:
    """Return a one-line error as HTML."""
    return f'<div class="card error" role="alert"><strong>This cannot be forecast</strong><p>{escape(text)}</p></div>'


@cache
def write_style() -> str:
    """Return the style sheet of the page."""
    return f"{STYLE}{charts.STYLE}{_OWN_STYLE}"


def _write_option(form: Form, name: str) -> str:
    """Return the field of an option: a choice if its values are listed, and a text otherwise."""
    write = _write_select if JOB_OPTIONS[name].choices else _write_input
    return write(name, getattr(form, name))


def _write_input(name: str, value: str, choices: Sequence[str] = ()) -> str:
    listed = "".join(f'<option value="{escape(choice)}"></option>' for choice in choices)
    attribute = f' list="known-{name}"' if choices else ""
    known = f'<datalist id="known-{name}">{listed}</datalist>' if choices else ""
    return (
        f'<label>{escape(LABELS[name])}<input name="{name}" value="{escape(value)}"{attribute} autocomplete="off">'
        f"</label>{known}"
    )


def _write_select(name: str, value: str) -> str:
    options, text = list[str](), f"default ({DEFAULTS[name]})"
    for choice in ("", *(JOB_OPTIONS[name].choices or ())):
        mark = " selected" if choice == value else ""
        options.append(f'<option value="{escape(choice)}"{mark}>{escape(choice or text)}</option>')
    return f'<label>{escape(LABELS[name])}<select name="{name}">{"".join(options)}</select></label>'
