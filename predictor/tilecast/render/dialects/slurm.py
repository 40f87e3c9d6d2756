"""Write sbatch commands, one for each pool. The first job that starts cancels the others.

https://slurm.schedmd.com/sbatch.html
"""

from __future__ import annotations

import shlex

from tilecast.advice import Advice, Offer
from tilecast.render.dialects.parts import (
    describe_ranking,
    find_gpu_names,
    find_safer,
    to_dns_label,
    write_comments,
)

_NICER = 100
"""Amount by which the priority falls (`--nice`) from one rank to the next."""


def write_submissions(advice: Advice) -> str:
    """Return a shell script that submits the job once for each pool, with the pool and the plan as its arguments."""
    if advice.best is None:
        return write_comments(describe_ranking(advice, "slurm"))
    lines = [
        *describe_ranking(advice, "slurm"),
        "Fill in partition and account: SBATCH_PARTITION and SBATCH_ACCOUNT, for no pool says them. The types of",
        "GPUs are those that gres.conf usually has: `sinfo -o %G` prints yours. train.sh gets the pool and the plan as",
        "$1 and $2, and begins with this line, so that one of the jobs runs:",
        '  scancel --me --state=PENDING --name="$SLURM_JOB_NAME"',
    ]
    name = to_dns_label(advice.request.name)
    submissions = [_write_submission(name, rank, one) for rank, one in enumerate(advice.offers)]
    if (safer := find_safer(advice, advice.best)) is not None:
        lines.append("With memory to spare, instead of the first line:")
        lines.append(f"  {_write_submission(name, 0, safer)}")
    return "#!/bin/sh\n" + write_comments(lines) + "\n".join(submissions) + "\n"


def _write_submission(name: str, rank: int, offer: Offer) -> str:
    """Return the command that submits the job for one offer. `rank` counts from 0."""
    kind = find_gpu_names(offer.pool.gpu).slurm
    options = (
        f"--job-name={name}",
        f"--nodes={offer.nodes}",
        "--ntasks-per-node=1",
        f"--gpus-per-node={kind}:{offer.gpus_per_node}",
        f"--nice={_NICER * rank}",
        "--exclusive" if offer.gpus_per_node == offer.pool.gpus_per_node else "",
    )
    return shlex.join(["sbatch", *filter(None, options), "train.sh", offer.pool.name, str(offer.plan)])
