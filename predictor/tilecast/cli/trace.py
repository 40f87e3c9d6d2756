"""`tilecast trace`: write the operator graph of a PyTorch module or an ONNX file."""

from __future__ import annotations

import argparse
from pathlib import Path

from tilecast.cli import EXIT_OK
from tilecast.cli.progress import show_wait
from tilecast.inputs.job import read_onnx
from tilecast.spec import SpecError
from tilecast.zoo.traced import document


def arguments(parser: argparse.ArgumentParser) -> None:
    help_ = "MODULE:FUNCTION that returns (module, example inputs), timm/NAME or timm/NAME@SIZE, or FILE.onnx"
    parser.add_argument("target", metavar="TARGET", help=help_)
    parser.add_argument("--seq", type=int, help="tokens per sample, where the ONNX file leaves them open")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="GRAPH.json")


def run(options: argparse.Namespace) -> int:
    from tilecast.zoo.traced import torch_export

    if options.target.endswith(".onnx"):
        with show_wait(f"reading {options.target}"):
            text = document.write(read_onnx(options.target, options.seq))
    elif options.seq is not None:
        raise SpecError("--seq", "is for an ONNX file", "give example inputs of that length")
    else:
        with show_wait(f"tracing {options.target}"):
            text = document.write(torch_export.trace(options.target))
    try:
        options.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError("--output", f"cannot write {options.output}", str(error.strerror or error)) from None
    print(f"tilecast advise {options.output} --batch SAMPLES --gpus GPU:N")
    return EXIT_OK
