"""Write docs/accuracy.md: the output of `tilecast validate` for every measured table.

    TILECAST_DATA=FOLDER python lab/accuracy.py     # takes some minutes

Only the page's text is written by hand.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import tilecast
from tilecast.cli import main as run
from tilecast.kernels import utilization

PAGE = Path(__file__).resolve().parent.parent / "docs" / "accuracy.md"


@dataclass(frozen=True, slots=True)
class Table:
    """Measured tables that are validated together. `files` are patterns below the data folder."""

    title: str
    text: str
    verb: str
    files: tuple[str, ...]


TABLES = (
    Table(
        "Training steps: published runs",
        "18 projects and vendors, A100, H100 and T4; rows of grade A and B.",
        "runs", ("e2e/published_dev.csv",),
    ),
    Table(
        "Training steps: second collection",
        "V100 to GB300 in seven frameworks, vision, recommenders and MLPerf, and measured peaks of memory. The rates of"
        " convolutions over volumes in FP32 and of TensorFlow's exchange over gRPC were read off its rows.",
        "runs", ("second/e2e/published2.csv",),
    ),
    Table(
        "Training steps: third collection, language",
        "Megatron on H800, NeMo on H100 and GB200, FSDP on 4 to 2,048 H100 of 64 GB, fine-tuning with peaks of memory,"
        " T4, T5, long contexts. The constants of a step are fitted to its rows too, and laws were chosen with it in"
        " sight.",
        "runs", ("third/e2e/llm.csv",),
    ),
    Table(
        "Training steps: third collection, vision",
        "OpenMMLab's zoos, StyleGAN2, diffusion, and peaks of fine-tuning. The factors of old cuDNN versions were read"
        " off its rows.",
        "runs", ("third/e2e/vision.csv",),
    ),
    Table(
        "Training steps: vTrain",
        "GPT on 2 to 512 A100, every combination of tensor, pipeline and data parallelism and micro-batch.",
        "runs", ("e2e/vtrain_dev.csv",),
    ),
    Table("Training steps: NeuSight", "Eager PyTorch in FP32 on nine GPUs.", "runs", ("e2e/neusight_dev.csv",)),
    Table(
        "One run for another",
        "Each row forecast from one other row of its source and model, with constants fitted without the source:"
        " `gain` is the corrected error over the raw one, with an interval from resampling the sources.",
        "transfer", ("e2e/*.csv", "second/e2e/published2.csv"),
    ),
    Table(
        "Kernels", "Matrix products, attention, convolutions and element-wise kernels, of every library of the tables.",
        "kernels", ("kernels/*/*.csv*", "neusight/kernels_*.csv.gz", "second/kernels/*.csv*"),
    ),
    Table(
        "Collectives", "NCCL, and what others measured around it, on links that the tables state.",
        "collectives", ("collectives/*/*.csv*",),
    ),
)  # fmt: skip

_HEAD = """\
# Accuracy

`python lab/accuracy.py` writes this page: the output of `tilecast validate` for each measured table. An error is
`|forecast - measured| / measured`; `macro` is the mean over groups (a source and model) of their means; `bias` keeps
the sign. `roofline` is a perfect machine, `one-MFU` one utilization per GPU and precision fitted to these rows. The
model card, `predictor/tilecast/kernels/weights/CARD.md`, names the sources and what the kernels were fitted to.

Version {version}, utilization model `{digest}`.

## Other measurements

**Collectives of 4 GPUs in one node**, with constants fitted to 2 and 8 GPUs alone: mean absolute error from 1 MiB on,
and below (nccl-tests' times from aiconfigurator; `python -m tilecast_lab links --leave-out 4`).

| link | all-reduce | all-gather | reduce-scatter | all-to-all |
|---|---|---|---|---|
| NVLink 3 (A100), 168 rows | 6.8 / 3.5 % | 8.9 / 4.0 % | 9.9 / 3.4 % | 7.1 / 8.1 % |
| NVLink 4 (H100, H200), 900 rows | 4.6 / 6.8 % | 6.3 / 8.2 % | 6.0 / 6.3 % | 6.9 / 17.0 % |

**Corrections from measured steps** (`python lab/bench/calibration.py RUNS.csv …`): every source is a cluster and
every GPU of it a pool. Some rows of a pool are observations, the others are forecast; the source is left out of the
fit (20 draws). The columns show the error, the share of steps inside the 90 % range, and its half-width.

| observations | 43 pools, 2,272 rows | 13 pools, 1,753 rows |
|---|---|---|
| 0 | 11.7 %, 96.4 %, 51 % | 11.5 %, 95.9 %, 50 % |
| 3 | 11.0 %, 97.4 %, 47 % | 11.6 %, 95.7 %, 47 % |
| 10 | | 10.9 %, 96.6 %, 52 % |
| 30 | | 10.0 %, 96.4 %, 43 % |

**Graphs**: 845 steps of timm's models on an RTX 3090, priced from their graphs (`--graphs`), were 9.1 % off in the
median (an earlier version).

**One run for another**: the gain of the table below is 0.76 (GPU), 0.67 (count) and 0.84 (plan) if each eighth of the
sources is also left out of the fit of what runs share.
"""


def page(data: Path) -> str:
    """Return the page as Markdown.

    Raises:
        RuntimeError: a table is missing, or `tilecast validate` refuses it.
    """
    parts = [_HEAD.format(version=tilecast.__version__, digest=utilization.load_model().sha256)]
    for table in TABLES:
        files = [path for pattern in table.files for path in sorted(data.glob(pattern))]
        if not files:
            raise RuntimeError(f"{data} has no {' '.join(table.files)}: set TILECAST_DATA to the folder of the tables")
        printed = io.StringIO()
        with redirect_stdout(printed):
            status = run(["validate", table.verb, *map(str, files)])
        if status:
            raise RuntimeError(f"tilecast validate {table.verb} ended with {status}")
        named = " ".join(f"$TILECAST_DATA/{pattern}" for pattern in table.files)
        shown = printed.getvalue().replace(f"{data}/", "").rstrip()
        parts.append(
            f"## {table.title}\n\n{table.text}\n`tilecast validate {table.verb} {named}`\n\n```\n{shown}\n```\n"
        )
    return "\n".join(parts)


def main() -> int:
    """Write the page."""
    try:
        PAGE.write_text(page(Path(os.environ.get("TILECAST_DATA", ""))), encoding="utf-8")
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
