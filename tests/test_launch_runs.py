"""What `--launch` prints, run: two processes for two steps over gloo, on CPUs, with a model of four layers.

The script is the printed one, behind a model and a data set, which `--launch` leaves to the user. A GPU's name is
replaced by the CPU's, and nothing else.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import need
from test_launch import setting
from tilecast.render.launch import write_launch
from tilecast.spec import Plan, Workload
from tilecast.zoo import huggingface

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(900)]

TIMEOUT_S = 300
SAMPLES, RANKS, STEPS = 8, 2, 2
TINY = huggingface.model(
    {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 4,
        "n_embd": 32,
        "n_head": 2,
        "n_positions": 16,
        "vocab_size": 64,
    }
)
JOB = Workload(TINY, 16, SAMPLES // STEPS, steps=STEPS)
PLANS = {
    "ddp": ("torchrun", replace(JOB, precision="bf16"), Plan(data=RANKS, gradient_accumulation=2)),
    "fsdp": ("fsdp2", JOB, Plan(data=RANKS, zero_stage=3, gradient_accumulation=2)),
    "fsdp-recomputed": ("fsdp2", JOB, Plan(data=RANKS, zero_stage=2, gradient_accumulation=2, checkpointing="full")),
    "trainer": ("trainer", JOB, Plan(data=RANKS, gradient_accumulation=2)),
    "deepspeed": ("deepspeed", JOB, Plan(data=RANKS, zero_stage=2, gradient_accumulation=2)),
}
"""Launches that run here. The Trainer's FSDP does not: Accelerate 1.15 makes no FSDP plugin under `--use_cpu`."""

BEFORE = """
import argparse, contextlib, functools, json, os, sys
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, GPT2Config, HfArgumentParser, Trainer, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

torch.cuda.set_device = lambda device: None
steps = 0


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        with open(f"seen-{os.environ['RANK']}", "a") as file:  # DeepSpeed reads samples in processes of its own.
            file.write(f"{index} ")
        tokens = torch.arange(index, index + 16) % 64
        return {"input_ids": tokens, "labels": tokens}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(4))
        self.head = nn.Linear(32, 64)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def loss_function(model, batch):
    logits = model(batch["input_ids"])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


torch.manual_seed(0)
dataset, model = Samples(), Model()
config = GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
before = {name: value.detach().clone() for name, value in model.named_parameters()}
"""
DEEPSPEED = """
import deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
args = deepspeed.add_config_arguments(parser).parse_args()
"""
AFTER = """
rank = torch.distributed.get_rank()
report = {"world": torch.distributed.get_world_size()}
report["backend"] = torch.distributed.group.WORLD._get_backend(torch.device("cpu")).name()
if "trainer" in globals():
    report["steps"] = trainer.state.global_step
    report["losses"] = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    report["layers"] = trainer.model.config.num_hidden_layers
else:
    report["steps"] = engine.global_steps if "engine" in globals() else i // 2
    report["losses"] = [float(loss)]
    report["layers"] = sum(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules())
    if "engine" in globals():
        from deepspeed.utils import safe_get_full_fp32_param as full
    else:
        full = lambda value: value.full_tensor() if hasattr(value, "full_tensor") else value
    now = {name.removeprefix("module."): full(value).detach() for name, value in model.named_parameters()}
    report["moved"] = all(bool((now[name].float() != before[name]).any()) for name in before)
with open(f"report-{rank}.json", "w") as file:
    json.dump(report, file)
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("name", PLANS)
def test_two_processes_train_two_steps(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        need("launchers", "torch is not installed")
    launcher, job, plan = PLANS[name]
    if launcher == "deepspeed" and shutil.which("g++") is None:
        pytest.skip("DeepSpeed compiles its operators with g++")
    given = setting(job, plan)
    line = write_launch(launcher, given)
    for file, text in line.files.items():
        (tmp_path / file).write_text(text)
    script = "\n".join(line.script).replace('"cuda"', '"cpu"')
    before = BEFORE.replace("SAMPLES", str(SAMPLES)) + (DEEPSPEED if launcher == "deepspeed" else "")
    (tmp_path / "train.py").write_text(f"{before}\n{script}\n{AFTER}")
    words = [sys.executable, "-m", "torch.distributed.run", *line.command[1:]]
    if launcher == "trainer":
        words += ["--use_cpu", "--logging_steps", "1", "--report_to", "none", "--save_strategy", "no"]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "built"),
    }
    log = tmp_path / "log"
    with log.open("w") as out:
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, stdout=out, stderr=out, check=False, timeout=TIMEOUT_S
        )
    assert done.returncode == 0, f"{script}\n{log.read_text()[-6000:]}"
    reports = [json.loads((tmp_path / f"report-{rank}.json").read_text()) for rank in range(RANKS)]
    for report in reports:
        assert (report["world"], report["backend"], report["steps"], report["layers"]) == (RANKS, "gloo", STEPS, 4)
        assert all(0 < loss < 10 for loss in report["losses"])
        assert report.get("moved", True)
    seen = [(tmp_path / f"seen-{rank}").read_text().split() for rank in range(RANKS)]
    assert sorted(int(index) for samples in seen for index in samples) == list(range(SAMPLES))
