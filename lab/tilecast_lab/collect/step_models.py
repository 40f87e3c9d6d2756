"""Models of Hugging Face transformers and torchvision with random weights, as losses of one micro-batch of random data.

`build_model` makes the model of a case, `make_optimizers` its optimizers. Only this module and `steps` use PyTorch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from .step_cases import MODELS, StepCase, TrainedModel

IMAGE, CLASSES = 224, 1000
TINY: Mapping[str, int] = {"n_layers": 2, "hidden": 64, "n_heads": 4, "n_kv_heads": 2, "ffn_hidden": 128, "vocab": 512}
"""Dimensions of language models in a check without a GPU."""
RATE = 1e-4


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """Model on its device with the loss of one micro-batch."""

    module: Any
    layers: list[Any]
    """Blocks that repeat, for compilation layer by layer; empty where the library does not list them."""
    loss: Callable[[], Any]


def build_model(case: StepCase, device: str, tiny: bool) -> BuiltModel:
    """Build the model of a case on a device and return it with its loss.

    Args:
        case: case to measure.
        device: "cuda" or "cpu".
        tiny: whether language models have the dimensions of `TINY`.
    """
    torch = importlib.import_module("torch")
    model = MODELS[case.model]
    if model.library == "transformers":
        built = _build_language_model(torch, case, model, device, tiny)
    else:
        built = _build_image_model(torch, case, model, device)
    module = built.module.train()
    if case.recipe == "pure-bf16":
        module.to(torch.bfloat16)
    if case.layout == "channels_last":
        module.to(memory_format=torch.channels_last)
    if case.checkpointing != "none":
        _turn_on_recomputation(torch, module, case)
    if case.compiled == "model":
        module.compile()
    if case.compiled == "layers":
        if not built.layers:
            raise ValueError(f"{case.model}: no list of layers to compile one by one")
        for layer in built.layers:
            layer.compile()
    return built


def _build_language_model(torch: Any, case: StepCase, model: TrainedModel, device: str, tiny: bool) -> BuiltModel:
    transformers = importlib.import_module("transformers")
    cells = {**model.dimensions, **(TINY if tiny else {})}
    config, name = CONFIGS[model.builder](transformers, cells, model.options, tiny)
    if case.attention != "own":
        config._attn_implementation = {"eager": "eager", "flex": "flex_attention"}.get(case.attention, "sdpa")
    if case.experts != "own":
        config._experts_implementation = case.experts
    config.use_cache = False
    with torch.device(device):
        module = getattr(transformers, name)(config)
        tokens = torch.randint(0, config.vocab_size, (case.batch, case.sequence))
    labels = torch.randint(0, 2, (case.batch,), device=device) if model.builder == "bert" else tokens
    layers = next(
        (list(found) for path in ("model.layers", "transformer.h", "bert.encoder.layer", "backbone.layers")
         if (found := _find_module(module, path)) is not None),
        [],
    )  # fmt: skip
    if case.loss == "own":
        return BuiltModel(module, layers, lambda: module(input_ids=tokens, labels=labels).loss)

    @torch.compile(dynamic=False)  # type: ignore[untyped-decorator]
    def cross_entropy(logits: Any) -> Any:
        shifted = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), shifted.flatten())

    return BuiltModel(module, layers, lambda: cross_entropy(module(input_ids=tokens).logits))


def _find_module(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _build_image_model(torch: Any, case: StepCase, model: TrainedModel, device: str) -> BuiltModel:
    torchvision = importlib.import_module("torchvision")
    layout = getattr(torch, f"{case.layout}_format" if case.layout == "contiguous" else case.layout)
    dtype = torch.bfloat16 if case.recipe == "pure-bf16" else torch.float32
    with torch.device(device):
        module = getattr(torchvision.models, model.builder)(weights=None)
        images = torch.randn(case.batch, 3, IMAGE, IMAGE, dtype=dtype).to(memory_format=layout)
        labels = torch.randint(0, CLASSES, (case.batch,))
    blocks = _find_module(module, "encoder.layers")
    layers = list(blocks.children()) if blocks is not None else []
    return BuiltModel(module, layers, lambda: torch.nn.functional.cross_entropy(module(images), labels))


def _configure_llama(
    transformers: Any, cells: Mapping[str, int], options: Mapping[str, int], tiny: bool
) -> tuple[Any, str]:
    tied = bool(options.get("tied", 0))
    return transformers.LlamaConfig(**_decoder_sizes(cells), tie_word_embeddings=tied), "LlamaForCausalLM"


def _configure_mixtral(
    transformers: Any, cells: Mapping[str, int], options: Mapping[str, int], tiny: bool
) -> tuple[Any, str]:
    experts = {"num_local_experts": options["experts"], "num_experts_per_tok": options["top_k"]}
    return transformers.MixtralConfig(**_decoder_sizes(cells), **experts, sliding_window=None), "MixtralForCausalLM"


def _configure_qwen3_moe(
    transformers: Any, cells: Mapping[str, int], options: Mapping[str, int], tiny: bool
) -> tuple[Any, str]:
    sizes = _decoder_sizes(cells) | {"moe_intermediate_size": cells["ffn_hidden"], "norm_topk_prob": True}
    sizes |= {"num_experts": options["experts"], "num_experts_per_tok": options["top_k"]}
    width = cells["hidden"] // cells["n_heads"]
    return transformers.Qwen3MoeConfig(**sizes, head_dim=width, tie_word_embeddings=False), "Qwen3MoeForCausalLM"


def _decoder_sizes(cells: Mapping[str, int]) -> dict[str, int]:
    return {
        "num_hidden_layers": cells["n_layers"], "hidden_size": cells["hidden"], "num_attention_heads": cells["n_heads"],
        "num_key_value_heads": cells["n_kv_heads"], "intermediate_size": cells["ffn_hidden"],
        "vocab_size": cells["vocab"], "max_position_embeddings": 8192,
    }  # fmt: skip


def _configure_gpt2(
    transformers: Any, cells: Mapping[str, int], options: Mapping[str, int], tiny: bool
) -> tuple[Any, str]:
    config = transformers.GPT2Config(
        n_layer=cells["n_layers"], n_embd=cells["hidden"], n_head=cells["n_heads"], vocab_size=cells["vocab"]
    )
    return config, "GPT2LMHeadModel"


def _configure_bert(
    transformers: Any, cells: Mapping[str, int], options: Mapping[str, int], tiny: bool
) -> tuple[Any, str]:
    layers, hidden = (2, 64) if tiny else (24, 1024)
    config = transformers.BertConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=hidden // 64, intermediate_size=4 * hidden
    )
    return config, "BertForSequenceClassification"


def _configure_t5(
    transformers: Any, cells: Mapping[str, int], options: Mapping[str, int], tiny: bool
) -> tuple[Any, str]:
    layers, hidden, heads = (2, 64, 1) if tiny else (12, 768, 12)
    config = transformers.T5Config(
        num_layers=layers, num_decoder_layers=layers, d_model=hidden, d_ff=4 * hidden, num_heads=heads, d_kv=64,
        decoder_start_token_id=0,
    )  # fmt: skip
    return config, "T5ForConditionalGeneration"


def _configure_mamba2(
    transformers: Any, cells: Mapping[str, int], options: Mapping[str, int], tiny: bool
) -> tuple[Any, str]:
    layers, hidden = (2, 64) if tiny else (24, 1024)
    config = transformers.Mamba2Config(
        num_hidden_layers=layers, hidden_size=hidden, num_heads=hidden // 32, head_dim=64, state_size=128, n_groups=1,
        vocab_size=512 if tiny else 32000,
    )  # fmt: skip
    return config, "Mamba2ForCausalLM"


Configure = Callable[[Any, Mapping[str, int], Mapping[str, int], bool], tuple[Any, str]]
CONFIGS: Mapping[str, Configure] = {
    "llama": _configure_llama, "mixtral": _configure_mixtral, "qwen3_moe": _configure_qwen3_moe,
    "gpt2": _configure_gpt2, "bert": _configure_bert, "t5": _configure_t5, "mamba2": _configure_mamba2,
}  # fmt: skip
"""Functions by builder that return a configuration of transformers and the name of its model class."""


def _turn_on_recomputation(torch: Any, module: Any, case: StepCase) -> None:
    """Turn on recomputation, of all layers or, as torchtitan selects, of all but attention and every second product."""
    options: dict[str, Any] = {"use_reentrant": False}
    if case.checkpointing == "selective":
        checkpoint = importlib.import_module("torch.utils.checkpoint")
        ops, policies = torch.ops.aten, checkpoint.CheckpointPolicy
        kept = {
            ops._scaled_dot_product_flash_attention.default, ops._scaled_dot_product_efficient_attention.default,
            ops._scaled_dot_product_cudnn_attention.default,
        }  # fmt: skip
        products = {ops.mm.default, ops.addmm.default}

        def contexts() -> Any:
            counts = {False: 0, True: 0}

            def policy(context: Any, op: Any, *arguments: Any, **named: Any) -> Any:
                if op in products:
                    counts[context.is_recompute] += 1
                is_kept = op in kept or (op in products and counts[context.is_recompute] % 2 == 1)
                return policies.MUST_SAVE if is_kept else policies.PREFER_RECOMPUTE

            return checkpoint.create_selective_checkpoint_contexts(policy)

        options["context_fn"] = contexts
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def make_optimizers(case: StepCase, module: Any) -> list[Any]:
    """Return the optimizers of a case; Muon's has another beside it, for weights that are no matrices of layers."""
    torch = importlib.import_module("torch")
    parameters = list(module.parameters())
    choices: Mapping[str, Callable[[list[Any]], Any]] = {
        "adamw-fused": partial(torch.optim.AdamW, lr=RATE, fused=True),
        "adamw-foreach": partial(torch.optim.AdamW, lr=RATE, foreach=True),
        "adamw-loop": partial(torch.optim.AdamW, lr=RATE, foreach=False, fused=False),
        "sgd": partial(torch.optim.SGD, lr=RATE, momentum=0.9),
        "adafactor": partial(torch.optim.Adafactor, lr=RATE),
        "muon": partial(torch.optim.Muon, lr=RATE),
    }
    if case.optimizer != "muon":
        return [choices[case.optimizer](parameters)]
    named = dict(module.named_parameters())
    outer = ("embed", "lm_head", "wte", "wpe")
    matrices = [one for name, one in named.items() if one.ndim == 2 and not any(word in name for word in outer)]
    chosen = {id(one) for one in matrices}
    others = [one for one in parameters if id(one) not in chosen]
    return [choices["muon"](matrices), choices["adamw-fused"](others)]


def force_attention(case: StepCase) -> AbstractContextManager[Any]:
    """Return the context that forces the backend of PyTorch's attention, if the case names one."""
    backends = importlib.import_module("torch.nn.attention")
    forced = {
        "flash": "FLASH_ATTENTION",
        "cudnn": "CUDNN_ATTENTION",
        "efficient": "EFFICIENT_ATTENTION",
        "math": "MATH",
    }
    if case.attention not in forced:
        return nullcontext()
    context: AbstractContextManager[Any] = backends.sdpa_kernel(getattr(backends.SDPBackend, forced[case.attention]))
    return context


def cast_automatically(case: StepCase, device: str) -> AbstractContextManager[Any]:
    """Return the context in which the forward pass of a case runs."""
    torch = importlib.import_module("torch")
    if not case.recipe.startswith("amp"):
        return nullcontext()
    dtype = torch.float16 if case.recipe == "amp-fp16" else torch.bfloat16
    context: AbstractContextManager[Any] = torch.autocast(device, dtype)
    return context
