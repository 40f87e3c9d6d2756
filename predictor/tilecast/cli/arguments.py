"""Arguments that several verbs share: the job and the pools."""

from __future__ import annotations

import argparse

from tilecast.api.job_kinds import list_job_kinds
from tilecast.objectives import OBJECTIVES
from tilecast.spec import (
    EXECUTIONS,
    GRADIENT_SYNCS,
    MEMORY_FORMATS,
    OPTIMIZERS,
    PRECISIONS,
    QUANTIZATIONS,
    SERVER_UPDATES,
)


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a job, and the flags that describe the job."""
    parser.add_argument(
        "job",
        help=f"a file with a TrainingJob, or with an annotated {list_job_kinds()}; a Hugging Face "
        "config.json, PEFT's adapter_config.json, or a folder with either; an ONNX file, a graph that `tilecast trace` "
        "wrote, or the name of a model preset",
    )
    parser.add_argument("--seq", type=int, help="tokens per sample, for a bare model")
    parser.add_argument("--batch", type=int, help="samples per optimizer step, for a bare model")
    parser.add_argument("--precision", choices=PRECISIONS, help="for a bare model; bf16 if absent")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="for a bare model; adamw if absent")
    parser.add_argument("--lora-rank", type=int, help="train only LoRA adapters of this rank, for a bare model")
    parser.add_argument(
        "--quantization", choices=QUANTIZATIONS, help="of frozen weights under --lora-rank, for a bare model"
    )
    parser.add_argument("--execution", choices=EXECUTIONS, help="for a bare model; eager if absent")
    parser.add_argument(
        "--memory-format", choices=MEMORY_FORMATS, help="of images, for a bare model; contiguous if absent"
    )
    parser.add_argument("--bucket-mib", type=int, help="of gradients, for a bare model; the framework's if absent")
    parser.add_argument("--gradient-sync", choices=GRADIENT_SYNCS, help="for a bare model; allReduce if absent")
    parser.add_argument("--parameter-servers", type=int, help="for a bare model; one for each node if absent")
    parser.add_argument("--server-updates", choices=SERVER_UPDATES, help="for a bare model; synchronous if absent")
    parser.add_argument("--steps", type=int, help="optimizer steps, for the time and cost to finish")
    text = "what the input pipeline of each node delivers; no step is shorter than that takes"
    parser.add_argument("--input-samples-per-second", type=float, metavar="RATE", help=text)
    parser.add_argument("--max-gpus", type=int)
    parser.add_argument("--objective", choices=list(OBJECTIVES))
    parser.add_argument("--deadline", metavar="TIME", help="for cheapestBeforeDeadline: seconds, or 90min, 36h, 14d")
    parser.add_argument("--budget", metavar="AMOUNT", help="for fastestWithinBudget: 5000 (USD), or 5000EUR")


def add_pool_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name pools, and the corrections for them."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--nodes", metavar="FILE", help="nodes and GPUPools as kubectl prints them; - reads standard input"
    )
    where.add_argument("--gpus", metavar="GPU:N,…", help="pools by GPU and count, for instance h100-sxm:16,a100-80:8")
    where.add_argument("--context", metavar="NAME", help="ask the cluster of this kubectl context")
    parser.add_argument(
        "--calibration", metavar="FILE", help="corrections that `tilecast calibrate RUNS.csv` wrote, for every pool"
    )
