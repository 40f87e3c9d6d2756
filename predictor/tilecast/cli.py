"""The laptop's door: manifests in, advice out, no cluster needed.

Exit status: 0 advice with a recommendation, 2 an input cannot be meant, 3 advice without a recommendation.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from tilecast import __version__, models
from tilecast.advise import Baseline, Constraints, Request, advise
from tilecast.hardware import NAME, Gpu, Pool, find_gpu, find_link, gpus, links
from tilecast.manifests import documents, instances, nodes, trainingjob
from tilecast.models import huggingface, traced
from tilecast.models.traced import document, onnx_file
from tilecast.render.document import FORMATS
from tilecast.spec import EXECUTIONS, OPTIMIZERS, PRECISIONS, Model, SpecError, Workload
from tilecast.trace import Trace

EXIT_OK, EXIT_BAD_INPUT, EXIT_NO_RECOMMENDATION = 0, 2, 3


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like every other error of the program."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"tilecast: {message}; see `{self.prog} --help`\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        status = run(options)
        sys.stdout.flush()
    except SpecError as error:
        print(f"tilecast: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except BrokenPipeError:
        sys.stderr.close()
        return EXIT_OK
    except OSError as error:
        print(f"tilecast: standard output: cannot be written: {error.strerror or error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tilecast", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    one = verbs.add_parser("advise", help="the best pool and plan for a job")
    one.add_argument(
        "job",
        help="a TrainingJob file, a Hugging Face config.json, an ONNX file, a graph that `tilecast trace` wrote, "
        "or the name of a model preset",
    )
    where = one.add_mutually_exclusive_group()
    where.add_argument(
        "--nodes", metavar="FILE", help="nodes and GPUPools as kubectl prints them; - reads standard input"
    )
    where.add_argument("--gpus", metavar="GPU:N,…", help="pools by GPU and count, for instance h100-sxm:16,a100-80:8")
    where.add_argument("--context", metavar="NAME", help="ask the cluster of this kubectl context")
    one.add_argument("--seq", type=int, help="tokens per sample, for a bare model")
    one.add_argument("--batch", type=int, help="samples per optimizer step, for a bare model")
    one.add_argument("--precision", choices=PRECISIONS, help="for a bare model; bf16 if absent")
    one.add_argument("--optimizer", choices=OPTIMIZERS, help="for a bare model; adamw if absent")
    one.add_argument("--lora-rank", type=int, help="train only LoRA adapters of this rank, for a bare model")
    one.add_argument("--execution", choices=EXECUTIONS, help="for a bare model; eager if absent")
    one.add_argument("--steps", type=int, help="optimizer steps, for the time and cost to finish")
    one.add_argument("--max-gpus", type=int)
    one.add_argument("--objective", choices=("time", "cost"))
    one.add_argument("--baseline", metavar="POOL:N", help="what you would run today, priced as a row of its own")
    one.add_argument("-o", "--output", choices=tuple(FORMATS), default="table")
    one.set_defaults(run=_advise)

    traced_ = verbs.add_parser(
        "trace", help="a PyTorch module or an ONNX file as a graph that `advise` and jobs read without torch and onnx"
    )
    traced_.add_argument(
        "target", metavar="TARGET", help="MODULE:FUNCTION that returns (module, example inputs), or FILE.onnx"
    )
    traced_.add_argument("--seq", type=int, help="tokens per sample, where the ONNX file leaves them open")
    traced_.add_argument("-o", "--output", type=Path, required=True, metavar="GRAPH.json")
    traced_.set_defaults(run=_trace)

    held = verbs.add_parser("validate", help="forecasts against measurements")
    kinds = held.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, help_ in (
        ("runs", "tables of measured training steps"),
        ("kernels", "tables of measured kernels"),
        ("collectives", "tables of measured collectives"),
    ):
        kind = kinds.add_parser(name, help=help_)
        kind.add_argument("files", nargs="+", type=Path, metavar="FILE")
        kind.add_argument("--rows", type=Path, metavar="OUT.csv", help="write one forecast per input row")
        if name == "kernels":
            kind.add_argument("--utilization-model", type=Path, metavar="FILE.onnx")
        kind.set_defaults(run=_VALIDATE[name])

    fitted = verbs.add_parser("calibrate", help="a link of yours, from nccl-tests' logs")
    fitted.add_argument("--nccl-tests", nargs="+", required=True, type=Path, metavar="LOG")
    fitted.add_argument("--link", metavar="NAME", help="the link to start from; that of the log's GPU if absent")
    fitted.add_argument("--name", metavar="NAME", help="what to call it; the link's name with -measured if absent")
    fitted.add_argument("-o", "--output", type=Path, metavar="FILE.toml", help="standard output if absent")
    fitted.set_defaults(run=_calibrate)

    shown = verbs.add_parser("show", help="what Tilecast knows")
    shown.add_argument("what", choices=tuple(_SHOW))
    shown.set_defaults(run=_show)
    return parser


def _advise(options: argparse.Namespace) -> int:
    request = _request(options)
    advice = advise(request, _pools(options))
    sys.stdout.write(FORMATS[options.output](advice))
    return EXIT_OK if advice.best else EXIT_NO_RECOMMENDATION


def _trace(options: argparse.Namespace) -> int:
    from tilecast.models.traced import torch_export

    if options.target.endswith(".onnx"):
        text = document.write(_onnx(options.target, options.seq))
    elif options.seq is not None:
        raise SpecError("--seq", "is for an ONNX file", "give example inputs of that length")
    else:
        text = document.write(torch_export.trace(options.target))
    try:
        options.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError("--output", f"cannot write {options.output}", str(error.strerror or error)) from None
    print(f"tilecast advise {options.output} --batch SAMPLES --gpus GPU:N")
    return EXIT_OK


def _onnx(target: str, sequence: int | None) -> Trace:
    if sequence is not None:
        _positive("--seq", sequence)
    return onnx_file.read(Path(target), sequence)


def _request(options: argparse.Namespace) -> Request:
    if options.job.endswith(".onnx"):
        request = _from_model(options, traced.model(Path(options.job).stem, _onnx(options.job, options.seq)))
    else:
        request = _from_file(options) if _is_file(options.job) else _from_model(options, models.preset(options.job))
    if options.objective:
        request = replace(request, objective=options.objective)
    if options.max_gpus is not None:
        _positive("--max-gpus", options.max_gpus)
        request = replace(request, constraints=replace(request.constraints, max_gpus=options.max_gpus))
    if options.baseline:
        pool, gpus_ = _pair("--baseline", options.baseline)
        request = replace(request, baseline=Baseline(pool, gpus_))
    return request


def _is_file(job: str) -> bool:
    return job == "-" or job.endswith((".yaml", ".yml", ".json")) or os.path.isfile(job)  # noqa: PTH113 (never raises)


def _from_file(options: argparse.Namespace) -> Request:
    found = documents.load(_read(options.job), options.job)
    if len(found) == 1 and document.is_document(found[0]):
        return _from_model(options, traced.model(Path(options.job).stem, document.read(found[0], options.job)))
    if len(found) == 1 and huggingface.is_config(found[0]):
        return _from_model(options, huggingface.model(found[0], options.job))
    if len(found) == 1 and not {"apiVersion", "kind"} & set(found[0]):
        remedy = "give apiVersion and kind of a TrainingJob, or the model_type of a Hugging Face config.json"
        raise SpecError(options.job, "is neither a job, a config.json nor a graph document", remedy)
    config_maps = {_name(item): item for item in found if item.get("kind") == "ConfigMap"}
    jobs = [document for document in found if document.get("kind") == trainingjob.KIND] or found
    if len(jobs) != 1:
        raise SpecError(options.job, f"holds {len(jobs)} jobs", "give a file with one TrainingJob")
    request = trainingjob.read(jobs[0], config_maps)
    for flag in ("seq", "batch", "precision", "optimizer", "execution", "lora_rank"):
        if getattr(options, flag) is not None:
            raise SpecError(f"--{flag.replace('_', '-')}", "describes a bare model", f"change {options.job} instead")
    if options.steps is not None:
        _positive("--steps", options.steps)
    return replace(request, workload=replace(request.workload, steps=options.steps or request.workload.steps))


def _name(document: Mapping[str, object]) -> str:
    metadata = document.get("metadata")
    return str(metadata.get("name")) if isinstance(metadata, Mapping) else ""


def _from_model(options: argparse.Namespace, model: Model) -> Request:
    for flag, value in (("--batch", options.batch), ("--steps", options.steps), ("--lora-rank", options.lora_rank)):
        if value is not None:
            _positive(flag, value)
    if options.batch is None:
        raise SpecError("--batch", "is missing", "say how many samples one optimizer step takes")
    if model.vocab and options.seq is None:
        raise SpecError("--seq", "is missing", f"{model.name} reads tokens: say how many per sample")
    if options.seq is not None:
        _positive("--seq", options.seq)
    if model.positions and (options.seq or 0) > model.positions:
        problem = f"{options.seq} is above the {model.positions} positions that {model.name} has"
        raise SpecError("--seq", problem, "shorten it")
    sequence_length = options.seq if model.vocab else 1
    if model.trace is not None:
        sequence_length = model.trace.sequence
        if options.seq not in (None, sequence_length):
            problem = f"{model.name} was traced with {sequence_length} tokens per sample"
            raise SpecError("--seq", problem, "leave it out, or trace anew")
    workload = Workload(
        model=model,
        sequence_length=sequence_length,
        global_batch=options.batch,
        precision=options.precision or "bf16",
        optimizer=options.optimizer or "adamw",
        execution=options.execution or "eager",
        steps=options.steps,
        lora_rank=options.lora_rank or 0,
    )
    return Request(model.name, workload, constraints=Constraints())


def _positive(field: str, value: int) -> None:
    if not 1 <= value <= 2**31:
        raise SpecError(field, f"{value} is not a positive count", "give an integer from 1")


def _pools(options: argparse.Namespace) -> Sequence[Pool]:
    if options.gpus:
        return _pools_of(options.gpus)
    if options.context:
        text, name = _kubectl(options.context), f"context {options.context}"
    elif options.nodes:
        text, name = _read(options.nodes), options.nodes
    else:
        raise SpecError("--nodes", "no pools are given", "give --nodes FILE, --gpus GPU:N,… or --context NAME")
    report = nodes.pools(*nodes.parse(text, name))
    for item in report.left_out:
        print(f"tilecast: left out {len(item.nodes)} nodes: {item.message}; {item.remedy}", file=sys.stderr)
    return report.require()


def _pools_of(text: str) -> list[Pool]:
    """Pools from `GPU:N,…`: nodes and list price of the largest instance type that has the GPU."""
    found: list[Pool] = []
    for item in text.split(","):
        name, count = _pair("--gpus", item)
        gpu = find_gpu(name)
        found.append(_usual_pool(gpu, count))
    names = [pool.name for pool in found]
    if len(set(names)) < len(names):
        raise SpecError("--gpus", f"{text} names a GPU twice", "add its counts up")
    return found


def _usual_pool(gpu: Gpu, count: int) -> Pool:
    types = [kind for kind in instances.node_types().values() if kind.gpu == gpu.name]
    priced = [kind for kind in types if kind.price_per_hour is not None]
    usual = max(priced or types, key=lambda kind: (kind.gpus, kind.name), default=None)
    per_node = min(count, usual.gpus if usual else 8)
    if count % per_node:
        remedy = f"give a multiple of {per_node}, or fewer"
        raise SpecError("--gpus", f"{gpu.name}:{count} does not fill nodes of {per_node} GPUs", remedy)
    return Pool(
        name=gpu.name,
        gpu=gpu,
        gpus_per_node=per_node,
        max_nodes=count // per_node,
        intra=find_link(gpu.intra_link),
        inter=usual.inter if usual else instances.default_network(gpu, per_node),
        node_type=usual.name if usual else "",
        price_per_gpu_hour=usual.price_per_gpu_hour if usual else None,
        currency=usual.currency if usual else "USD",
    )


def _pair(field: str, text: str) -> tuple[str, int]:
    name, colon, count = text.strip().partition(":")
    if not (name and colon and count.isdecimal() and len(count) <= 7 and 0 < int(count) <= 2**20):
        raise SpecError(field, f"cannot read {text!r}", "write NAME:COUNT, for instance h100-sxm:16")
    return name, int(count)


def _read(name: str) -> str:
    try:
        if name == "-" and sys.stdin is None:
            raise SpecError("-", "there is no standard input", "name a file")
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(name, "cannot be read", str(error.strerror or error)) from None
    except UnicodeDecodeError:
        raise SpecError(name, "is not UTF-8 text", "give YAML or JSON") from None


def _kubectl(context: str) -> str:
    command = ["kubectl", "--context", context, "get", "nodes,gpupools.tilecast.dev", "-o", "json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    except OSError as error:
        raise SpecError("--context", "kubectl cannot be run", str(error.strerror or error)) from None
    if done.returncode:
        problem = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit status {done.returncode}"
        raise SpecError("--context", f"kubectl failed: {problem}", "check the context, or pipe nodes into --nodes -")
    return done.stdout


def _validate_runs(options: argparse.Namespace) -> int:
    from tilecast.validate import runs

    print(runs.run(options.files, options.rows))
    return EXIT_OK


def _validate_kernels(options: argparse.Namespace) -> int:
    from tilecast.validate import kernels

    print(kernels.run(options.files, options.rows, options.utilization_model))
    return EXIT_OK


def _validate_collectives(options: argparse.Namespace) -> int:
    from tilecast.validate import collectives

    print(collectives.run(options.files, options.rows))
    return EXIT_OK


_VALIDATE = {"runs": _validate_runs, "kernels": _validate_kernels, "collectives": _validate_collectives}


def _calibrate(options: argparse.Namespace) -> int:
    from tilecast import calibrate

    logs = [calibrate.read_log(path) for path in options.nccl_tests]
    measured = calibrate.Measured.concatenate([log.measured for log in logs])
    spans = max(log.nodes for log in logs) > 1
    if options.link is None and spans:
        raise SpecError("--link", "the log spans nodes", "name the network to start from, see `tilecast show links`")
    link = find_link(options.link or find_gpu(logs[0].gpu).intra_link)
    if link.per_node != spans:
        joins = "nodes" if link.per_node else "GPUs of a node"
        raise SpecError("--link", f"{link.name} joins {joins}, the log another", "name a link that the log measured")
    name = options.name or f"{link.name}-measured"
    if re.fullmatch(NAME, name) is None:
        raise SpecError("--name", f"{name!r} is no name for a link", "use small letters, digits, dots and dashes")
    other = find_link(find_gpu(logs[0].gpu).intra_link if spans else "ethernet-100")
    done = calibrate.calibrate(link, measured, other, name)
    source = f"tilecast calibrate, from {link.name}: {len(measured)} rows of nccl-tests on {logs[0].gpu}"
    text = calibrate.toml(done.link, source)
    table = [f"{'collective':<28}{'rows':>6}{'before':>9}{'after':>9}{'unseen':>9}"]
    table += [f"{what:<28}{rows:>6}{was:>9.1%}{now:>9.1%}{out:>9.1%}" for what, rows, was, now, out in done.errors]
    if options.output is None:
        print("\n".join(f"# {line}" for line in table), text, sep="\n", end="")
        return EXIT_OK
    try:
        options.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(str(options.output), "cannot be written", str(error.strerror or error)) from None
    print("\n".join(table))
    print(f"wrote {options.output}: put it into the folder that TILECAST_LINKS names, and name the link {name}")
    return EXIT_OK


def _show(options: argparse.Namespace) -> int:
    for line in _SHOW[options.what]():
        print(line)
    return EXIT_OK


def _gpu_lines() -> list[str]:
    lines = [f"{'GPU':16s} {'GiB':>5s} {'GB/s':>6s} {'SMs':>4s}  dense TFLOP/s"]
    for gpu in gpus().values():
        memory, bandwidth = gpu.memory_bytes / 2**30, gpu.memory_bandwidth_bytes_per_s / 1e9
        rates = "  ".join(f"{name} {rate / 1e12:g}" for name, rate in gpu.peak_flops.items())
        lines.append(f"{gpu.name:16s} {memory:5.0f} {bandwidth:6.0f} {gpu.sm_count:4d}  {rates}")
    return lines


def _model_lines() -> list[str]:
    distinct = {model.name: model for model in models.presets().values()}
    return [f"{'MODEL':22s} {'FAMILY':10s} PARAMETERS"] + [
        f"{name:22s} {model.family:10s} {models.parameters(Workload(model, 128, 1)) / 1e6:10,.0f}M"
        for name, model in sorted(distinct.items())
    ]


def _link_lines() -> list[str]:
    return [f"{'LINK':22s} {'GB/s':>7s}  PER"] + [
        f"{link.name:22s} {link.bandwidth_bytes_per_s / 1e9:7.4g}  {'node' if link.per_node else 'GPU'}"
        for link in links().values()
    ]


_SHOW: Mapping[str, Callable[[], list[str]]] = {"gpus": _gpu_lines, "models": _model_lines, "links": _link_lines}
