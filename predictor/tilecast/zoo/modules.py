"""Modules of a layer that recomputation can select: those of each model, with their operators and collectives.

Operators are found by their names. Modules are those of `recomputation.MODULES`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from tilecast import frameworks
from tilecast.model import Model
from tilecast.spec import Workload
from tilecast.zoo.deepseek import Deepseek
from tilecast.zoo.dimensions import Transformer

SHARED_MLP = "experts.shared-"
"""Beginning of the names of the operators of the shared MLP."""
_OPERATORS: Mapping[str, re.Pattern[str]] = {
    "layernorm": re.compile(r"(.*-)?(attention|mlp|experts)\.norm(\..*)?"),
    "mla_up_proj": re.compile(r"attention\.(key-value-up|query-up|rotary|concatenate)(\..*)?"),
    "mlp_act": re.compile(r"mlp\.activation(\..*)?"),
    "mlp": re.compile(r"mlp\.(up|activation|down)(\..*)?"),
    "moe_act": re.compile(r"experts\.activation(\..*)?"),
    "shared_experts": re.compile(rf"{re.escape(SHARED_MLP)}.*"),
    "moe": re.compile(r"experts\.(?!norm|residual).*"),
    "attn_out": re.compile(r"(.*-)?attention\.(output|residual)(\..*)?"),
}
"""Names of the forward operators of each module, without those of the attention core."""
_EXCHANGES: Mapping[str, re.Pattern[str]] = {
    "mlp": re.compile(r"mlp\.(gather|scatter|reduce)"),
    "moe": re.compile(r"experts\.(dispatch|combine|shared).*"),
    "shared_experts": re.compile(r"experts\.shared\..*"),
    "attn_out": re.compile(r"(.*-)?attention\.(scatter|reduce)"),
}
"""Names of the forward collectives of each module that has collectives."""
NO_GRADIENT = ("reference.", "own-pass.")
"""Beginnings of the names of operators and collectives in forward passes that keep nothing for a backward pass."""
_LAST = re.compile(r"mlp\.(down|residual|reduce|scatter)(\..*)?")
"""Forward operators and collectives of a dense layer that come after the last tensor that a gradient needs."""
_FUSED_NORM = re.compile(r"((.*-)?attention|mlp)\.norm(\..*)?")
"""Norms before dense products, which some frameworks run as part of the product."""


@lru_cache(maxsize=4096)
def list_modules_of_operator(name: str, *, selective: bool, fuses_norms: bool, latent: bool) -> frozenset[str]:
    """Return the modules that a forward operator of a layer belongs to.

    Args:
        name: name of the operator.
        selective: whether the operator belongs to the core of attention.
        fuses_norms: whether the framework fuses each norm with the dense product after the norm.
        latent: whether the model has latent attention, whose norms are not fused with its down-projections.
    """
    if selective:
        return frozenset({"core_attn", "attn_out"})
    found = {module for module, pattern in _OPERATORS.items() if pattern.fullmatch(name)}
    if not latent:
        found.discard("mla_up_proj")
    if fuses_norms and _FUSED_NORM.fullmatch(name) and not (latent and "attention" in name):
        found = {"mlp"} if name.startswith("mlp") else set()
    return frozenset(found)


def is_repeated_in_full(workload: Workload, name: str) -> bool:
    """Return whether the operator or collective `name` runs again if its layer or module is recomputed in full.

    Some frameworks stop before the last product of a layer, unless dropout or a norm follows that product.
    """
    if name.startswith(NO_GRADIENT):
        return False
    model = workload.model
    if frameworks.find_framework(workload).recomputes_last_product or model.dropout or model.family not in _PRE_NORM:
        return True
    return _LAST.fullmatch(name) is None


_PRE_NORM = frozenset({"decoder", "moe", "deepseek"})
"""Families with a norm before the MLP and none after it."""


def find_shared_half(name: str) -> str:
    """Return the exchange of experts beside which Megatron-Core can run an operator of the shared MLP, in either pass.

    The first product and the activation are beside the dispatch, the second product is beside the combination
    (transformer/moe/token_dispatcher.py: linear_fc1_forward_and_act, linear_fc2_forward).
    """
    return "experts.combine" if name.startswith(f"{SHARED_MLP}down") else "experts.dispatch"


@lru_cache(maxsize=256)
def list_modules_of_collective(name: str) -> frozenset[str]:
    """Return the modules that a forward collective of a layer belongs to."""
    return frozenset(module for module, pattern in _EXCHANGES.items() if pattern.fullmatch(name))


def list_modules(model: Model) -> frozenset[str]:
    """Return the modules that the layers of a model have. Without usual transformer layers, there are none."""
    dims = model.dimensions
    if model.trace is not None or not isinstance(dims, Transformer) or model.family not in _FAMILIES:
        return frozenset()
    names = {"core_attn", "layernorm", "mla_up_proj" if isinstance(dims, Deepseek) else "attn_out"}
    if dims.experts:
        names |= {"moe", "moe_act"}
        if dims.shared_ffn_hidden:
            names.add("shared_experts")
    if not dims.experts or dims.moe_every > 1 or dims.first_dense:
        names |= {"mlp", "mlp_act"}
    return frozenset(names)


_FAMILIES = frozenset({"decoder", "encoder", "moe", "encdec", "deepseek"})
"""Families whose layers consist only of the usual sublayers of `transformer.build_layer`."""
