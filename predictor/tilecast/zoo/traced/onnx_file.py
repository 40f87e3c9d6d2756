"""Convert an ONNX file to a trace.

Shapes are inferred for a fixed batch size, and constants are folded. Values are read only of small constants, and of
square ones to distinguish masks from weights. The first dimension of every input is the batch. Any further symbolic
dimension is the sequence, whose length the caller sets. A dimension of size zero or less counts as symbolic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilecast.spec import SpecError
from tilecast.trace import Shape, Trace, TraceOperator
from tilecast.zoo.traced.document import check_and_normalize, refuse_unknown_operators
from tilecast.zoo.traced.operators import compute_matmul_sizes

BATCH = 2
"""Size of a symbolic batch while shapes are inferred. A size of 1 would broadcast."""
SMALL = 4096
"""Most elements of a constant whose value is kept. Shapes are computed from such constants."""
FORBIDDEN = -1e4
"""Largest value that a mask adds to a score to exclude a pair of positions."""
MOST_ROUNDS = 32


def read(path: Path, sequence: int | None = None) -> Trace:
    """Return the trace of an ONNX file.

    Args:
        path: the file. Its external data is not read.
        sequence: size of a symbolic dimension other than the batch.

    Raises:
        SpecError: the package onnx is missing, the file is not ONNX, a dimension cannot be bound, a shape cannot be
            inferred, or an operator is unknown.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SpecError(str(path), "cannot be read", str(error.strerror or error)) from None
    return parse(content, str(path), sequence)


def parse(content: bytes, name: str, sequence: int | None = None) -> Trace:
    """Return the trace of an ONNX file whose content is given. Error messages call the file `name`.

    Raises:
        SpecError: for the same reasons as `read`.
    """
    try:
        import onnx
    except ImportError:
        remedy = (
            "run `pip install tilecast[onnx]`, or give what `tilecast trace FILE.onnx -o graph.json` writes elsewhere"
        )
        raise SpecError(name, "an ONNX file needs the package onnx, which is not installed", remedy) from None
    remedy = "give what torch.onnx.export or another exporter wrote"
    try:
        model = onnx.load_model_from_string(content)
    except Exception:
        raise SpecError(name, "is not an ONNX file", remedy) from None
    if not model.graph.node or not model.graph.input:
        raise SpecError(name, "is not an ONNX file, or an empty one", remedy)
    return _OnnxReader(model, name, sequence).read()


class _OnnxReader:
    """Reader of one ONNX model."""

    def __init__(self, model: Any, name: str, sequence: int | None) -> None:
        self.model = model
        self.name = name
        self.known: dict[str, npt.NDArray[Any]] = {}
        self.weights: dict[str, Shape] = {}
        self.shapes: dict[str, Shape] = {}
        self._extract_weights()
        self.batch, self.sequence = self._bind_dimensions(sequence)

    def read(self) -> Trace:
        supported = {*_TABLE, *_SPECIAL}
        unknown = Counter(
            f"{node.domain}:{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
            for node in self.model.graph.node
            if node.op_type not in supported
        )
        refuse_unknown_operators(unknown, supported, self.name)
        self._infer_shapes()
        operators = []
        for node in self.model.graph.node:
            for name in (*node.input, *node.output):
                if name and name not in self.shapes:
                    problem = f"the shape of {name} ({node.op_type}) cannot be inferred"
                    raise SpecError(self.name, problem, "export with fixed sizes, or simplify the file")
            operators.append(self._convert_node(node))
        trace = Trace(
            batch=self.batch,
            sequence=self.sequence,
            inputs=tuple(self.inputs),
            parameters=tuple(name for name, shape in self.weights.items() if prod(shape) > 1),
            outputs=tuple(one.name for one in self.model.graph.output if one.name in self.shapes),
            shapes=self.shapes,
            operators=tuple(operators),
        )
        return check_and_normalize(trace, self.name)

    def _extract_weights(self) -> None:
        """Replace large initializers with inputs of the same shape.

        Small initializers keep their values, because shapes may be computed from these.
        """
        from onnx import TensorProto, helper, numpy_helper

        graph = self.model.graph
        floats = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}
        declared = {one.name for one in graph.input}
        for tensor in graph.initializer:
            shape = tuple(max(1, int(size)) for size in tensor.dims)
            self.shapes[tensor.name] = shape
            is_here = tensor.data_location != TensorProto.EXTERNAL
            try:
                if tensor.data_type in floats and not (is_here and _is_mask(shape, tensor)):
                    self.weights[tensor.name] = shape
                if prod(shape) <= SMALL and is_here:
                    self.known[tensor.name] = numpy_helper.to_array(tensor)
            except Exception:
                remedy = "export the model anew"
                raise SpecError(self.name, f"has a damaged tensor {tensor.name!r}", remedy) from None
            if tensor.name in self.known:
                continue
            if tensor.name not in declared:
                graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        large = [one for one in graph.initializer if one.name in self.known]
        stored = {one.name for one in graph.initializer}
        del graph.initializer[:]
        graph.initializer.extend(large)
        self.inputs = [one.name for one in graph.input if one.name not in stored]

    def _bind_dimensions(self, sequence: int | None) -> tuple[int, int]:
        """Set the sizes of the symbolic dimensions of the inputs. Return the batch size and the tokens per sample."""
        from onnx import TensorProto

        declared = [one for one in self.model.graph.input if one.name in self.inputs]
        free: set[str] = set()
        batches: list[int] = []
        for one in declared:
            dims = one.type.tensor_type.shape.dim
            if not dims:
                continue
            batches.append(dims[0].dim_value if dims[0].dim_value > 0 else BATCH)
            for position, dim in enumerate(dims):
                if position and dim.dim_value <= 0:
                    free.add(dim.dim_param or f"{one.name}[{position}]")
        if len(free) > 1:
            problem = f"has the dynamic dimensions {', '.join(sorted(free))} beside the batch"
            raise SpecError(self.name, problem, "export with at most one (the sequence), the others fixed")
        if free and sequence is None:
            raise SpecError("--seq", "is missing", f"{self.name} leaves {min(free)} open: say how many tokens")
        if not batches:
            raise SpecError(self.name, "has no input with a batch dimension", "let the first dimension be the batch")
        batch = batches[0]
        for one in declared:
            dims = one.type.tensor_type.shape.dim
            for position, dim in enumerate(dims):
                if dim.dim_value <= 0:
                    dim.dim_value = (sequence or 1) if position else batch
            self.shapes[one.name] = tuple(dim.dim_value for dim in dims)
        whole = (TensorProto.INT64, TensorProto.INT32)
        ids = [self.shapes[one.name] for one in declared if one.type.tensor_type.elem_type in whole]
        tokens = next((shape[1] for shape in ids if len(shape) == 2), 1)
        if sequence is not None and tokens > 1 and sequence != tokens:
            raise SpecError("--seq", f"{self.name} is fixed at {tokens} tokens", f"say {tokens}, or export anew")
        return batch, tokens

    def _infer_shapes(self) -> None:
        """Infer shapes and fold constants alternately until nothing changes, for at most `MOST_ROUNDS` rounds."""
        import onnx

        graph = self.model.graph
        for one in graph.output:
            one.type.tensor_type.ClearField("shape")
        for _ in range(MOST_ROUNDS):
            del graph.value_info[:]
            try:
                inferred = onnx.shape_inference.infer_shapes(self.model, data_prop=True)
            except Exception as error:
                reason = (str(error).strip().splitlines() or ["no reason given"])[-1][:160]
                remedy = "export with a batch and shapes that fit"
                raise SpecError(self.name, f"its shapes do not fit: {reason}", remedy) from None
            before = len(self.shapes)
            for one in (*inferred.graph.value_info, *inferred.graph.output):
                dims = one.type.tensor_type.shape.dim
                if one.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
                    self.shapes[one.name] = tuple(max(1, dim.dim_value) for dim in dims)
            folded = self._fold_constants()
            if not folded and len(self.shapes) == before:
                return

    def _fold_constants(self) -> int:
        """Replace every node with constant inputs by its value, and return the number of replaced nodes."""
        from onnx import helper, numpy_helper
        from onnx.reference import ReferenceEvaluator

        graph, opsets, folded, left = self.model.graph, self.model.opset_import, [], []
        for node in graph.node:
            left.append(node)
            if node.op_type == "Shape" and node.input[0] in self.shapes and not node.attribute:
                self.known[node.output[0]] = np.array(self.shapes[node.input[0]], dtype=np.int64)
                folded.append(left.pop())
            elif len(node.output) == 1 and all(not name or name in self.known for name in node.input):
                if prod(self.shapes.get(node.output[0], (1,))) > SMALL:
                    continue
                values = {name: self.known[name] for name in node.input if name}
                try:
                    function = helper.make_function("", "node", list(values), node.output, [node], opsets)
                    result: Any = ReferenceEvaluator(function).run(None, values)
                except Exception:  # noqa: S112 (a node that cannot be computed stays, and its shape is inferred)
                    continue
                self.known[node.output[0]] = np.asarray(result[0])
                folded.append(left.pop())
        for node in folded:
            value = self.known[node.output[0]]
            self.shapes[node.output[0]] = tuple(max(1, size) for size in value.shape)
            graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
        count, nodes = len(folded), [type(node).FromString(node.SerializeToString()) for node in left]
        del graph.node[:]
        graph.node.extend(nodes)
        return count

    def _convert_node(self, node: Any) -> TraceOperator:
        inputs = tuple(node.input)
        outputs = tuple(name for name in node.output if name)
        if not any(inputs):
            return TraceOperator("constant", (), outputs)
        if node.op_type in _SPECIAL:
            kind, inputs, attributes = _SPECIAL[node.op_type](_Node(node, self))
            return TraceOperator(kind, inputs, outputs[:1], attributes)
        kind = _TABLE[node.op_type]
        return TraceOperator(kind, inputs[: _READ.get(kind, 1)], outputs)


def _is_mask(shape: Shape, tensor: Any) -> bool:
    """Return whether a constant is an attention mask: it is square and has a value far below any weight."""
    from onnx import numpy_helper

    if len(shape) < 2 or shape[-1] != shape[-2]:
        return False
    return bool(np.min(numpy_helper.to_array(tensor).astype(np.float32)) < FORBIDDEN)


_Call = tuple[str, tuple[str, ...], dict[str, float]]


class _Node:
    """An ONNX node with its attributes and the shapes of its inputs and output."""

    def __init__(self, node: Any, reader: _OnnxReader) -> None:
        from onnx import helper

        self.name: str = node.op_type
        self.inputs: tuple[str, ...] = tuple(str(name) for name in node.input)
        self.output = str(node.output[0])
        self.attributes: dict[str, Any] = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        self.reader = reader

    def shape(self, position: int) -> Shape:
        return self.reader.shapes[self.inputs[position]]

    @property
    def output_shape(self) -> Shape:
        return self.reader.shapes[self.output]

    def constant(self, position: int) -> npt.NDArray[Any] | None:
        """Return the value of the input at `position` if it is a small constant, otherwise None."""
        return self.reader.known.get(self.inputs[position]) if position < len(self.inputs) else None


def _read_matmul(node: _Node) -> _Call:
    return "matmul", node.inputs[:2], compute_matmul_sizes(node.shape(0), node.shape(1), node.output_shape)


def _read_gemm(node: _Node) -> _Call:
    transposed = bool(node.attributes.get("transA", 0))
    sizes = compute_matmul_sizes(node.shape(0), node.shape(1), node.output_shape, transposed=transposed)
    return "matmul", node.inputs[:3], sizes


def _read_convolution(node: _Node) -> _Call:
    transposed = node.name == "ConvTranspose"
    return "convolution", node.inputs[:3], {
        "groups": float(node.attributes.get("group", 1)), "transposed": float(transposed)
    }  # fmt: skip


def _read_attention(node: _Node) -> _Call:
    """Return the call of an attention node: its kind, inputs and attributes.

    Query, key and value have the shape (batch, heads, tokens, width), or (batch, tokens, heads · width) with the number
    of heads in an attribute.
    """
    query, key = node.shape(0), node.shape(1)
    if len(query) == 4:
        heads, kv_heads, seq_q, seq_kv, head_dim = query[1], key[1], query[2], key[2], query[3]
    else:
        heads = int(node.attributes.get("q_num_heads", 1))
        kv_heads = int(node.attributes.get("kv_num_heads", heads))
        seq_q, seq_kv, head_dim = query[1], key[1], query[2] // heads
    return "attention", node.inputs[:3], {
        "batch": query[0], "heads": heads, "kv_heads": kv_heads, "seq_q": seq_q, "seq_kv": seq_kv,
        "head_dim": head_dim, "causal": float(node.attributes.get("is_causal", 0)), "dropout": 0.0,
    }  # fmt: skip


def _build_norm_reader(kind: str, default: int) -> Callable[[_Node], _Call]:
    def convert(node: _Node) -> _Call:
        shape = node.shape(0)
        axis = int(node.attributes.get("axis", default)) % len(shape)
        return kind, node.inputs[:3], {"cols": float(prod(shape[axis:]))}

    return convert


def _read_softmax(node: _Node) -> _Call:
    axis = int(node.attributes.get("axis", -1))
    return "softmax", node.inputs[:1], {"cols": float(node.shape(0)[axis])}


def _read_loss(node: _Node) -> _Call:
    return "loss", node.inputs[:2], {"cols": float(node.shape(0)[1])}


def _read_gather(node: _Node) -> _Call:
    """Return the call of a gather node, which is an embedding if the node reads rows of a matrix of weights."""
    axis = int(node.attributes.get("axis", 0))
    if axis == 0 and node.inputs[0] in node.reader.weights and len(node.shape(0)) == 2:
        return "embedding", node.inputs[:2], {}
    return ("part" if len(node.output_shape) <= len(node.shape(0)) else "copy"), node.inputs[:1], {}


def _read_transpose(node: _Node) -> _Call:
    rank = len(node.shape(0))
    axes = node.attributes.get("perm", list(range(rank))[::-1])
    return "transpose", node.inputs[:1], {f"axis{position}": float(axis) for position, axis in enumerate(axes)}


def _read_power(node: _Node) -> _Call:
    exponent = node.constant(1)
    is_inverse_root = exponent is not None and exponent.size == 1 and float(exponent.ravel()[0]) == -0.5
    return ("reciprocal-root" if is_inverse_root else "power"), node.inputs[:1], {}


def _read_product(node: _Node) -> _Call:
    """Return the call of a Mul or Div node.

    The call is a product of two tensors, a scale if one operand is a known scalar, or a reciprocal if a known scalar is
    divided by a tensor.
    """
    numbers = [at for at in (0, 1) if prod(node.shape(at)) == 1 and node.inputs[at] in node.reader.known]
    if node.name == "Div" and numbers == [0]:
        return "from-output", node.inputs[1:], {}
    if numbers:
        return "scale", tuple(name for at, name in enumerate(node.inputs) if at != numbers[0]), {}
    return "multiply", node.inputs[:2], {}


_SPECIAL: Mapping[str, Callable[[_Node], _Call]] = {
    "MatMul": _read_matmul,
    "Gemm": _read_gemm,
    "Conv": _read_convolution,
    "ConvTranspose": _read_convolution,
    "Attention": _read_attention,
    "LayerNormalization": _build_norm_reader("layernorm", -1),
    "SimplifiedLayerNormalization": _build_norm_reader("rmsnorm", -1),
    "RMSNormalization": _build_norm_reader("rmsnorm", -1),
    "Softmax": _read_softmax,
    "LogSoftmax": _read_softmax,
    "SoftmaxCrossEntropyLoss": _read_loss,
    "Gather": _read_gather,
    "Transpose": _read_transpose,
    "Pow": _read_power,
    "Mul": _read_product,
    "Div": _read_product,
}

_KINDS: Mapping[str, str] = {
    "channelnorm": "BatchNormalization InstanceNormalization GroupNormalization LRN LpNormalization",
    "pool": "MaxPool AveragePool LpPool",
    "reduction": "ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare "
    "ReduceLogSumExp GlobalAveragePool GlobalMaxPool",
    "copy": "Concat Pad Tile GatherElements GatherND ScatterElements ScatterND DepthToSpace SpaceToDepth Resize "
    "Upsample CumSum TopK RotaryEmbedding",
    "reshape": "Reshape Flatten",
    "view": "Unsqueeze Squeeze Expand Identity",
    "part": "Slice Split",
    "add": "Add Sub Sum Mean",
    "multiply": "Mod",
    "scale": "Neg Abs Sign Floor Ceil Round",
    "cast": "Cast CastLike",
    "select": "Where Clip Max Min Trilu",
    "from-input": "Log Sin Cos HardSwish HardSigmoid LeakyRelu Mish Softplus PRelu",
    "from-output": "Exp Elu Selu Celu Reciprocal",
    "root": "Sqrt",
    "erf": "Erf",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "gelu": "Gelu",
    "silu": "Swish",
    "relu": "Relu",
    "dropout": "Dropout",
    "compare": "Equal Greater GreaterOrEqual Less LessOrEqual Not And Or Xor IsNaN IsInf ArgMax ArgMin",
    "constant": "Constant ConstantOfShape Shape Size Range OneHot RandomNormalLike RandomUniformLike EyeLike",
}
_READ: Mapping[str, int | None] = {
    "channelnorm": 3, "from-input": 2, **dict.fromkeys(("compare", "add", "multiply", "select", "copy")),
}  # fmt: skip
"""Number of inputs that are tensors, for kinds where it is not one. None means all."""
_TABLE: Mapping[str, str] = {name: kind for kind, names in _KINDS.items() for name in names.split()}
"""Kind of each ONNX operator that is determined by its name alone."""
