"""Command-line arguments for the job and the pools, shared by several verbs."""

from __future__ import annotations

import argparse

from tilecast.api.job_kinds import list_job_kinds
from tilecast.inputs.job_options import BARE_OPTIONS, JOB_OPTIONS
from tilecast.inputs.reading import to_flag


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a job, and the flags for its options, to a parser."""
    parser.add_argument(
        "job",
        nargs="?",
        help=f"a file with a TrainingJob, or with an annotated {list_job_kinds()}; a Hugging Face "
        "config.json, PEFT's adapter_config.json, or a folder with either; an ONNX file, a graph that `tilecast trace` "
        "wrote, or the name of a model preset; or a shell script with a launch line. Everything behind -- is a launch "
        "command: -- torchrun …",
    )
    parser.add_argument(
        "--lenient",
        action="store_true",
        help="ignore options of a launch command that change speed or memory and are not priced",
    )
    every = parser.add_argument_group("the run and its limits")
    bare = parser.add_argument_group("how a bare model is trained (a preset, a config.json, an ONNX file or a graph)")
    for name, option in JOB_OPTIONS.items():
        group = bare if name in BARE_OPTIONS else every
        flags, text = [to_flag(one) for one in (name, *option.aliases)], option.help.replace("%", "%%")
        if option.is_switch:
            group.add_argument(*flags, dest=name, action=argparse.BooleanOptionalAction, help=text)
        else:
            group.add_argument(
                *flags, dest=name, choices=option.choices, metavar=option.metavar, help=text, action=_StoreByName
            )


class _StoreByName(argparse.Action):
    """Action that stores a value under the flag that was typed, so that errors name that flag."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Store a value. If several names of an option are given, the last one is used."""
        for flag in self.option_strings:
            if hasattr(namespace, name := flag.lstrip("-").replace("-", "_")):
                setattr(namespace, name, None)
        setattr(namespace, (option_string or self.dest).lstrip("-").replace("-", "_"), values)


def add_pool_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name pools, and the flag for a file of corrections, to a parser."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--nodes", metavar="FILE", help="nodes and GPUPools as kubectl prints them; - reads standard input"
    )
    where.add_argument(
        "--gpus",
        metavar="GPU:N,…",
        help="pools by GPU and count (h100-sxm:16, 8xh100, h100-sxm:3x4 for 3 nodes of 4) or by instance type and "
        "nodes (p5.48xlarge:2); @LINK names a link (h100-sxm:16@infiniband-ndr-8x400)",
    )
    where.add_argument("--context", metavar="NAME", help="ask the cluster of this kubectl context")
    parser.add_argument(
        "--link",
        metavar="LINK",
        help="the link in or between nodes of every pool, for which --gpus names none: a name of `tilecast show "
        "links`, or ethernet-N of N Gb/s; several with commas",
    )
    parser.add_argument(
        "--calibration", metavar="FILE", help="corrections that `tilecast calibrate RUNS.csv` wrote, for every pool"
    )
