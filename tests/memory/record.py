"""Records `torch.json`, what PyTorch's MemTracker sees of one training step of each configuration below.

    python tests/memory/record.py --date YYYY-MM-DD

Needs torch, and no GPU: every tensor is fake. Fake CUDA tensors have no backward pass on a machine without a GPU, so
the tensors are of the CPU. Dropout with a byte mask and FlashAttention are called by name, since only CUDA would choose
them, and the RMS norm keeps what CUDA's keeps. A 16-bit model has weights and gradients in 16 bit; Adam updates
masters in FP32. A step holds its logits until it ends, as the usual loops do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

aten = torch.ops.aten

_GPT2 = {
    "family": "decoder", "layers": 12, "hidden": 768, "heads": 12, "vocab": 50257, "positions": 1024, "dropout": True,
}  # fmt: skip
_SMALL_GPT = {**_GPT2, "layers": 4, "hidden": 256, "heads": 8, "vocab": 8192}
_BERT = {
    "family": "encoder", "layers": 12, "hidden": 768, "heads": 12, "vocab": 30522, "positions": 512, "causal": False,
    "dropout": True, "head_share": 0.15625, "embedding_norm": 1, "token_types": 2, "final_norm": 0,
    "head_transform": 1, "pooler": 1,
}  # fmt: skip
_LLAMA = {
    "family": "decoder", "layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn_hidden": 8192, "vocab": 128256,
    "gated_mlp": True, "rms_norm": True, "rotary": True, "bias": False, "tied_embeddings": True,
}  # fmt: skip
_LLAMA_7B = {
    **_LLAMA, "layers": 32, "hidden": 4096, "kv_heads": 32, "ffn_hidden": 11008, "vocab": 32000,
    "tied_embeddings": False,
}  # fmt: skip
_RESNET = {"family": "resnet", "image": 224, "bottleneck": True, "stages": [3, 4, 6, 3]}
_RESNET_18 = {"family": "resnet", "image": 224, "stages": [2, 2, 2, 2]}


def _case(name: str, model: dict[str, Any], batch: int, sequence: int = 1, **other: str) -> dict[str, Any]:
    usual = {"precision": "bf16", "attention": "flash", "checkpointing": "none", "optimizer": "adam"}
    return {"name": name, "model": model, "batch": batch, "sequence": sequence, **usual, **other}


CASES = (
    _case("small-gpt-fp32-eager", _SMALL_GPT, 2, 256, precision="fp32", attention="eager"),
    _case("small-gpt-fp32-flash", _SMALL_GPT, 4, 512, precision="fp32"),
    _case("gpt2-eager", _GPT2, 4, 1024, attention="eager"),
    _case("gpt2-flash", _GPT2, 4, 1024),
    _case("gpt2-flash-short", _GPT2, 8, 256),
    _case("gpt2-eager-selective", _GPT2, 4, 1024, attention="eager", checkpointing="selective"),
    _case("gpt2-flash-full", _GPT2, 8, 1024, checkpointing="full"),
    _case("bert-base-eager", _BERT, 8, 512, attention="eager"),
    _case("bert-base-fp32-flash", _BERT, 16, 128, precision="fp32"),
    _case("llama-1b", _LLAMA, 2, 2048),
    _case("llama-1b-full", _LLAMA, 4, 2048, checkpointing="full"),
    _case("llama-7b", _LLAMA_7B, 1, 4096),
    _case("resnet-50-fp32", _RESNET, 32, precision="fp32", optimizer="momentum"),
    _case("resnet-50", _RESNET, 64, optimizer="momentum"),
    _case("resnet-18-fp32", _RESNET_18, 64, precision="fp32", optimizer="momentum"),
)


class _FusedRMSNorm(torch.autograd.Function):
    """CUDA's kernels keep the input and a statistic of each row. Fake tensors have no values to compute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return _FusedRMSNorm.apply(x, self.weight)


def dropout(x: Tensor, model: dict[str, Any]) -> Tensor:
    return torch.native_dropout(x, 0.1, True)[0] if model.get("dropout") else x


def norm(model: dict[str, Any]) -> nn.Module:
    return (RMSNorm if model.get("rms_norm") else nn.LayerNorm)(model["hidden"])


class Attention(nn.Module):
    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.case, self.model = case, (model := case["model"])
        hidden, heads, bias = model["hidden"], model["heads"], model.get("bias", True)
        self.kv_heads, self.width = model.get("kv_heads", heads), hidden // heads
        self.query = nn.Linear(hidden, hidden, bias=bias)
        self.key = nn.Linear(hidden, self.kv_heads * self.width, bias=bias)
        self.value = nn.Linear(hidden, self.kv_heads * self.width, bias=bias)
        self.output = nn.Linear(hidden, hidden, bias=bias)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal, rate = self.model.get("causal", True), 0.1 if self.model.get("dropout") else 0.0
        if self.case["attention"] == "flash":
            return aten._scaled_dot_product_flash_attention(q, k, v, rate, causal)[0]
        scores = q @ k.transpose(2, 3) * self.width**-0.5
        if causal:
            hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        return dropout(scores.softmax(-1), self.model) @ v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        if self.model.get("rotary"):
            q, k = rotate(q), rotate(k)
        if self.case["checkpointing"] == "selective":
            mixed = checkpoint(self.core, q, k, v, use_reentrant=False)
        else:
            mixed = self.core(q, k, v)
        return self.output(mixed.transpose(1, 2).flatten(2))


def rotate(x: Tensor) -> Tensor:
    cos, sin = torch.ones(2, x.shape[2], x.shape[3])
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class MLP(nn.Module):
    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        hidden, bias = model["hidden"], model.get("bias", True)
        width = model.get("ffn_hidden", 4 * hidden)
        self.up, self.down = nn.Linear(hidden, width, bias=bias), nn.Linear(width, hidden, bias=bias)
        self.gate = nn.Linear(hidden, width, bias=bias) if model.get("gated_mlp") else None

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))


class TransformerLayer(nn.Module):
    """Norms before the branches in a decoder, after them in an encoder."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.model = model = case["model"]
        self.attention, self.mlp, self.norms = Attention(case), MLP(model), nn.ModuleList([norm(model), norm(model)])

    def forward(self, x: Tensor) -> Tensor:
        for branch, normalise in zip((self.attention, self.mlp), self.norms, strict=True):
            if self.model.get("causal", True):
                x = x + dropout(branch(normalise(x)), self.model)
            else:
                x = normalise(x + dropout(branch(x), self.model))
        return x


class StackedModel(nn.Module):
    """Decoder, or BERT with both its tasks; `forward` returns the loss and what else a loop would hold."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.case, self.model = case, (model := case["model"])
        hidden, vocab = model["hidden"], model["vocab"]
        self.is_bert = not model.get("causal", True)
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(model["positions"], hidden) if model.get("positions") else None
        self.layers = nn.ModuleList(TransformerLayer(case) for _ in range(model["layers"]))
        self.norm = norm(model)
        self.logits = nn.Linear(hidden, vocab, bias=self.is_bert)
        if model.get("tied_embeddings", True):
            self.logits.weight = self.tokens.weight
        if self.is_bert:
            self.types = nn.Embedding(2, hidden)
            self.transform, self.transform_norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
            self.pooler, self.next_sentence = nn.Linear(hidden, hidden), nn.Linear(hidden, 2)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1]))
        if self.is_bert:
            x = self.norm(x + self.types(torch.zeros_like(tokens)))
        x = dropout(x, self.model)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.case["checkpointing"] == "full" else layer(x)
        loss = torch.zeros(())
        if self.is_bert:
            pooled = self.next_sentence(torch.tanh(self.pooler(x[:, 0])))
            loss = F.cross_entropy(pooled.float(), torch.zeros(len(x), dtype=torch.long))
            chosen = torch.zeros(len(targets), dtype=torch.long)
            x = self.transform_norm(F.gelu(self.transform(x.flatten(0, 1)[chosen])))
        else:
            x = self.norm(x)
        logits = self.logits(x)
        return loss + F.cross_entropy(logits.flatten(0, -2).float(), targets), logits


class ConvolutionUnit(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, *, relu: bool = True) -> None:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outputs), *[nn.ReLU(inplace=True)] * relu)


class ResidualUnit(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            units = (
                ConvolutionUnit(inputs, width, 1),
                ConvolutionUnit(width, width, 3, stride),
                ConvolutionUnit(width, outputs, 1, relu=False),
            )
        else:
            units = (ConvolutionUnit(inputs, width, 3, stride), ConvolutionUnit(width, width, 3, relu=False))
        self.branch = nn.Sequential(*units)
        is_changed = stride > 1 or inputs != outputs
        self.shortcut = ConvolutionUnit(inputs, outputs, 1, stride, relu=False) if is_changed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        branch = self.branch(x)
        branch += self.shortcut(x)
        return F.relu(branch, inplace=True)


class ResNet(nn.Module):
    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        model = case["model"]
        bottleneck, channels = bool(model.get("bottleneck")), 64
        parts: list[nn.Module] = [ConvolutionUnit(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
        for stage in range(4):
            width = 64 * 2**stage
            for index in range(model["stages"][stage]):
                parts.append(ResidualUnit(channels, width, 2 if stage and not index else 1, bottleneck))
                channels = 4 * width if bottleneck else width
        self.body = nn.Sequential(*parts)
        self.logits = nn.Linear(channels, 1000)

    def forward(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(self.body(images).mean((2, 3)))
        return F.cross_entropy(logits.float(), targets), logits


def _inputs(case: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    model, batch = case["model"], case["batch"]
    if model["family"] == "resnet":
        return torch.randn(batch, 3, model["image"], model["image"], dtype=dtype), torch.zeros(batch, dtype=torch.long)
    tokens = torch.zeros(batch, case["sequence"], dtype=torch.long)
    return tokens, torch.zeros(int(tokens.numel() * model.get("head_share", 1)), dtype=torch.long)


def record(case: dict[str, Any]) -> dict[str, int]:
    """Bytes of a step: states, what is alive between forward and backward pass, and the most that a pass needs
    besides states (`peak`)."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case["precision"]]
    torch.set_default_dtype(dtype)
    network = ResNet(case) if case["model"]["family"] == "resnet" else StackedModel(case)
    weights = list(network.parameters())
    masters = weights if dtype is torch.float32 else [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = _OPTIMIZERS[case["optimizer"]](masters)
    inputs = _inputs(case, dtype)
    tracker = MemTracker()
    tracker.track_external(network, *inputs)
    with tracker:
        held = network(*inputs)
        current_bytes = _seen(tracker, "current")
        held[0].backward()
        peak = _seen(tracker, "peak")
        after = _seen(tracker, "current")
    del held
    # The update is outside the tracker's step: masters of a 16-bit model are no parameters of the network.
    for weight, master in zip(weights, masters, strict=True):
        master.grad = weight.grad if master is weight else weight.grad.float()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    owned = states + ([] if masters is weights else masters)
    return {
        "parameters": after["Parameter"],
        "gradients": after["Gradient"],
        "optimizer": sum(value.numel() * value.element_size() for value in owned if value.ndim),
        "activations": current_bytes["Activation"] + current_bytes["Other"],
        "peak": peak["Activation"] + peak["Temp"] + peak["Other"],
    }


_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda weights: torch.optim.Adam(weights, foreach=False),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, foreach=False),
}


def _seen(tracker: MemTracker, when: str) -> dict[str, int]:
    snapshot = tracker.get_tracker_snapshot(when)[torch.device("cpu")]
    return {getattr(kind, "value", kind): size for kind, size in snapshot.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Record torch.json.")
    parser.add_argument("--date", required=True, help="day of the recording, YYYY-MM-DD")
    day = parser.parse_args().date
    rows = []
    for case in CASES:
        with FakeTensorMode():
            rows.append({**case, "bytes": record(case)})
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    about = {"torch": torch.__version__, "date": day, "command": f"python tests/memory/record.py --date {day}"}
    text = json.dumps(about)[:-1] + f', "steps": [\n{lines}\n]}}\n'
    Path(__file__).with_name("torch.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
