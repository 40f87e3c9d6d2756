"""Measure how long the page of `tilecast web` takes for presets: the first answer, and a repeated one.

    python bench/web.py

Each preset is asked once in a process that has answered another preset before, as a visitor finds it.
"""

from __future__ import annotations

import statistics
import time

from tilecast.public.tools import warm_up
from tilecast.web.answers import Form, write_answer
from tilecast.web.page import EXAMPLE, write_page, write_style

FORMS = (
    Form(model="gpt2-xl", seq="1024", batch="256", gpus="l4:8"),
    Form(model="llama-3.1-8b", seq="8192", batch="128", gpus="h100-sxm:8"),
    Form(model="qwen2.5-14b", seq="4096", batch="256", gpus="a100-80:16"),
    Form(model="llama-3.1-70b", seq="8192", batch="512", gpus="h100-sxm:64"),
    Form(model="mixtral-8x7b", seq="4096", batch="256", gpus="h100-sxm:32"),
    Form(model="resnet-50", batch="1024", gpus="l4:8,t4:8"),
    Form(model="bert-large", seq="512", batch="1024", gpus="a100-40:8"),
)


def main() -> None:
    """Print the seconds and bytes of each answer."""
    warm_up()
    seconds = []
    for form in FORMS:
        began = time.perf_counter()
        size = len(write_answer(form).encode())
        first = time.perf_counter() - began
        began = time.perf_counter()
        write_answer(form)
        again = time.perf_counter() - began
        seconds.append(first)
        print(f"{form.model:<16}{form.gpus:<16}{first * 1e3:8.0f} ms{again * 1e3:8.0f} ms again{size / 1e3:8.0f} kB")
    page = len(write_page(EXAMPLE).encode()) + len(write_style().encode())
    print(f"median {statistics.median(seconds) * 1e3:.0f} ms; the page itself has {page / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
