"""Convert PyTorch operators to the kinds of operators in `operators.OPERATORS`.

`READERS` maps the name of an operator to a function that returns kind, inputs and attributes. `KINDS` maps the names of
all other operators to their kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from tilecast.trace import Shape
from tilecast.zoo.traced.operators import compute_matmul_sizes


def read_operator_name(node: Any) -> str:
    """Return the name of the operator that a node calls, such as `add` for `aten.add.Tensor`."""
    return (str(node.target).split(".")[:2])[-1]


def list_tensors(value: Any) -> list[Any]:
    """Return the graph nodes in nested lists, tuples and mappings of arguments, in order."""
    if isinstance(value, list | tuple):
        return [one for item in value for one in list_tensors(item)]
    if isinstance(value, Mapping):
        return list_tensors(list(value.values()))
    return [value] if hasattr(value, "op") and hasattr(value, "name") else []


_Call = tuple[str, tuple[str, ...], dict[str, float]]
_Shapes = Mapping[str, Shape]


def _read_argument(node: Any, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def _list_input_names(node: Any, count: int) -> tuple[str, ...]:
    return tuple(one.name for one in list_tensors([*node.args, *node.kwargs.values()])[:count])


def _read_linear(node: Any, shapes: _Shapes) -> _Call:
    names = _list_input_names(node, 3)
    weight = shapes[names[1]]
    sizes = compute_matmul_sizes(shapes[names[0]], weight[::-1], shapes[node.name])
    return "matmul", names, sizes


def _read_matmul(node: Any, shapes: _Shapes) -> _Call:
    names = _list_input_names(node, 2)
    return "matmul", names, compute_matmul_sizes(shapes[names[0]], shapes[names[1]], shapes[node.name])


def _read_addmm(node: Any, shapes: _Shapes) -> _Call:
    bias, left, right = _list_input_names(node, 3)
    return "matmul", (left, right, bias), compute_matmul_sizes(shapes[left], shapes[right], shapes[node.name])


def _read_einsum(node: Any, shapes: _Shapes) -> _Call:
    """Return the call of an einsum of two operands, which becomes a batched matrix product.

    A letter in both operands and in the output is a batch dimension. A letter only in both operands is summed over.
    """
    names = _list_input_names(node, 2)
    terms, _, answer = str(node.args[0]).replace(" ", "").partition("->")
    letters = terms.split(",")
    if len(letters) != 2 or "." in terms or len(names) != 2:
        return "multiply", names, {}
    sizes = {letter: size for term, name in zip(letters, names, strict=True)
             for letter, size in zip(term, shapes[name], strict=True)}  # fmt: skip
    left, right = (set(term) for term in letters)

    def size(chosen: set[str]) -> float:
        return float(prod(sizes[letter] for letter in chosen))

    output = set(answer)
    return "matmul", names, {
        "batch": size(left & right & output), "rows": size((left - right) & output),
        "columns": size((right - left) & output), "depth": size((left & right) - output),
    }  # fmt: skip


def _read_convolution(node: Any, shapes: _Shapes) -> _Call:
    name = read_operator_name(node)
    names = _list_input_names(node, 3)
    if name == "convolution":
        groups, transposed = node.args[8], bool(node.args[6])
    else:
        transposed = "transpose" in name
        groups = _read_argument(node, 6, "groups", 1)
        if transposed and not isinstance(groups, int):
            groups = 1
    return "convolution", names, {"groups": float(groups), "transposed": float(transposed)}


def _read_attention(node: Any, shapes: _Shapes) -> _Call:
    names = _list_input_names(node, 4)
    query, key = shapes[names[0]], shapes[names[1]]
    mask = shapes.get(names[3], ()) if len(names) > 3 else ()
    square = len(mask) >= 2 and mask[-2] == mask[-1] == key[-2] > 1
    return "attention", names[:4] if mask else names[:3], {
        "batch": prod(query[:-3]), "heads": query[-3], "kv_heads": key[-3], "seq_q": query[-2], "seq_kv": key[-2],
        "head_dim": query[-1], "causal": float(bool(_read_argument(node, 5, "is_causal", False)) or square),
        "dropout": float(_read_argument(node, 4, "dropout_p", 0.0) or 0.0),
    }  # fmt: skip


def _build_norm_reader(kind: str) -> Callable[[Any, _Shapes], _Call]:
    def convert(node: Any, shapes: _Shapes) -> _Call:
        return kind, _list_input_names(node, 3), {"cols": float(prod(node.args[1]))}

    return convert


def _read_softmax(node: Any, shapes: _Shapes) -> _Call:
    axis = int(_read_argument(node, 1, "dim", -1))
    return "softmax", _list_input_names(node, 1), {"cols": float(shapes[node.name][axis])}


def _read_loss(node: Any, shapes: _Shapes) -> _Call:
    names = _list_input_names(node, 2)
    scores = shapes[names[0]]
    return "loss", names, {"cols": float(scores[1] if len(scores) > 1 else scores[0])}


def _read_power(node: Any, shapes: _Shapes) -> _Call:
    is_inverse_root = _read_argument(node, 1, "exponent") == -0.5
    return ("reciprocal-root" if is_inverse_root else "power"), _list_input_names(node, 2), {}


def _read_product(node: Any, shapes: _Shapes) -> _Call:
    names = _list_input_names(node, 2)
    return ("multiply" if len(names) > 1 else "scale"), names, {}


def _list_axes(axes: Sequence[int]) -> dict[str, float]:
    return {f"axis{position}": float(axis % len(axes)) for position, axis in enumerate(axes)}


def _read_transpose(node: Any, shapes: _Shapes) -> _Call:
    rank = len(shapes[node.args[0].name])
    axes = list(range(rank))
    first, second = (node.args[1], node.args[2]) if len(node.args) > 2 else (rank - 2, rank - 1)
    if rank > 1:
        axes[first], axes[second] = axes[second], axes[first]
    return "transpose", _list_input_names(node, 1), _list_axes(axes)


def _read_permute(node: Any, shapes: _Shapes) -> _Call:
    return "transpose", _list_input_names(node, 1), _list_axes([int(axis) for axis in node.args[1]])


def _read_dropout(node: Any, shapes: _Shapes) -> _Call:
    is_active = bool(_read_argument(node, 2, "train", True)) and float(_read_argument(node, 1, "p", 0.5)) > 0
    return ("dropout" if is_active else "view"), _list_input_names(node, 1), {}


READERS: Mapping[str, Callable[[Any, _Shapes], _Call]] = {
    "linear": _read_linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv"), _read_matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _read_addmm),
    "einsum": _read_einsum,
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        _read_convolution,
    ),
    "scaled_dot_product_attention": _read_attention,
    "layer_norm": _build_norm_reader("layernorm"),
    "rms_norm": _build_norm_reader("rmsnorm"),
    "group_norm": lambda node, _: (
        "channelnorm",
        _list_input_names(node, 3),
        {"groups": float(_read_argument(node, 1, "num_groups", 1))},
    ),
    "softmax": _read_softmax,
    "log_softmax": _read_softmax,
    "cross_entropy_loss": _read_loss,
    "pow": _read_power,
    **dict.fromkeys(("mul", "mul_", "div", "div_", "true_divide"), _read_product),
    **dict.fromkeys(("transpose", "t", "mT", "numpy_T", "swapaxes"), _read_transpose),
    "permute": _read_permute,
    **dict.fromkeys(("dropout", "dropout_", "feature_dropout"), _read_dropout),
    "copy_": lambda node, _: ("copy", _list_input_names(node, 2)[1:], {}),
    **dict.fromkeys(
        ("gather", "index", "index_select", "take_along_dim"), lambda node, _: ("copy", _list_input_names(node, 1), {})
    ),
}

_NAMES: Mapping[str, str] = {
    "embedding": "embedding",
    "channelnorm": "batch_norm instance_norm",
    "pool": "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d adaptive_max_pool2d max_pool2d_with_indices",
    "reduction": "mean sum amax amin max_dim var std var_mean std_mean norm linalg_vector_norm logsumexp prod "
    "nll_loss_nd mse_loss",
    "copy": "cat concat stack pad constant_pad_nd roll repeat tile repeat_interleave scatter scatter_add index_add "
    "index_put masked_fill_scatter upsample_nearest2d upsample_bilinear2d upsample_nearest1d upsample_bicubic2d "
    "upsample_linear1d upsample_nearest3d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d pixel_shuffle pixel_unshuffle "
    "im2col col2im grid_sampler flip clone cumsum topk sort",
    "reshape": "view reshape flatten contiguous unflatten _unsafe_view view_as reshape_as",
    "view": "unsqueeze squeeze expand expand_as alias detach lift_fresh_copy broadcast_to chunk split split_with_sizes "
    "unbind tensor_split movedim unfold detach_ meshgrid",
    "part": "slice select narrow",
    "add": "add add_ sub sub_ rsub addcmul lerp",
    "multiply": "fmod remainder floor_divide",
    "scale": "neg abs_ sign floor ceil round",
    "cast": "to _to_copy type_as float half bfloat16",
    "select": "where masked_fill masked_fill_ maximum minimum max min tril triu clamp clamp_min clamp_max clamp_",
    "from-input": "log log2 log1p abs sin cos hardswish hardswish_ hardsigmoid hardsigmoid_ leaky_relu leaky_relu_ "
    "mish mish_ softplus prelu square log_sigmoid silu_ atan logaddexp glu",
    "from-output": "exp exp2 expm1 elu elu_ selu celu reciprocal hardtanh hardtanh_",
    "root": "sqrt",
    "reciprocal-root": "rsqrt",
    "erf": "erf",
    "tanh": "tanh tanh_",
    "sigmoid": "sigmoid sigmoid_",
    "gelu": "gelu",
    "silu": "silu",
    "relu": "relu relu_ relu6 relu6_",
    "compare": "eq ne gt lt ge le logical_not logical_and logical_or bitwise_not bitwise_and bitwise_or isnan argmax "
    "argmin isinf any all bitwise_or_ __and__ __or__",
    "constant": "arange full full_like zeros zeros_like ones ones_like empty empty_like scalar_tensor rand_like "
    "randn_like new_zeros new_ones new_full eye linspace one_hot sym_size new_empty fill_ bernoulli "
    "bernoulli_ normal_ uniform_ rand randn randint randperm tensor detach_copy",
}
KINDS: Mapping[str, str] = {name: kind for kind, names in _NAMES.items() for name in names.split()}
"""Kind of each PyTorch operator that is determined by its name alone."""
