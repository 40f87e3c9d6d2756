"""Time of `tilecast scan` for many jobs, most of which repeat a command.

python bench/scan.py                              # 2,000 jobs of 50 commands; target 60 s on one core
python bench/scan.py --jobs 200 --distinct 20
"""

from __future__ import annotations

import argparse
import time

from tilecast.inputs.pools import PoolOptions
from tilecast.inputs.scan import select_jobs
from tilecast.public.scanning import JobScanner

MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "mistralai/Mistral-7B-v0.1", "openai-community/gpt2-xl")
GPUS = "h100-sxm:64,a100-80:64,l40s:32"
TARGET_S = 60


def make_job(number: int, kind: int) -> dict[str, object]:
    """Return a PyTorchJob whose command is one of many.

    Args:
        number: number of the job.
        kind: number of its command.
    """
    pods, batch, sequence = 1 << kind % 3, 1 << kind // 3 % 3, (1024, 2048, 4096)[kind // 9 % 3]
    words = (
        "torchrun", "train.py", "--model_name_or_path", MODELS[kind % len(MODELS)], "--fsdp", "full_shard",
        "--per_device_train_batch_size", str(batch), "--model_max_length", str(sequence), "--bf16", "True",
        "--gradient_accumulation_steps", str(1 + kind // 27), "--gradient_checkpointing", "True",
    )  # fmt: skip
    resources = {"limits": {"nvidia.com/gpu": 8}}
    pod = {"spec": {"containers": [{"name": "pytorch", "command": list(words), "resources": resources}]}}
    replicas = {"Master": {"replicas": 1, "template": pod}}
    if pods > 1:
        replicas["Worker"] = {"replicas": pods - 1, "template": pod}
    spec = {"nprocPerNode": "8", "pytorchReplicaSpecs": replicas}
    metadata = {"name": f"job-{number}", "namespace": f"team-{number % 20}"}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": metadata, "spec": spec}


def main() -> None:
    """Print how long a scan takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--distinct", type=int, default=50)
    options = parser.parse_args()
    documents = [make_job(number, number % options.distinct) for number in range(options.jobs)]
    scanner = JobScanner.from_options(PoolOptions(gpus=GPUS))
    start, start_cpu = time.perf_counter(), time.process_time()
    found = scanner.scan(select_jobs(documents))
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
    outcomes = {name: sum(row.outcome == name for row in found.rows) for name in ("better", "doesNotRun", "notRead")}
    print(f"{options.jobs:,} jobs of {options.distinct} commands: {found.searches} searches, {outcomes}")
    print(f"{cpu_s:.1f} s of CPU, {wall_s:.1f} s of wall clock (target {TARGET_S} s on one core)")


if __name__ == "__main__":
    main()
