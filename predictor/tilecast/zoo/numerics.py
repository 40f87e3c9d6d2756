"""Data types of tensors and fusion of kernels, which follow from a workload and its framework."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilecast import frameworks, fuse
from tilecast.frameworks import Composed, Framework, Loss
from tilecast.graph import Phase
from tilecast.spec import ELEMENT_BYTES, QUANTIZED, Workload
from tilecast.zoo.dimensions import Transformer

PHASES: tuple[Phase, ...] = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Numerics:
    """Data types and kernel fusion of a workload, on which the operators of every layer depend."""

    matrix: str
    """Precision of matrix products."""
    vector: str
    """Precision of everything else. Activations of FP8 jobs stay in BF16, those of TF32 jobs in FP32."""
    element: float
    """Bytes of one activation."""
    residual_element: float
    """Bytes per element of the residual stream, which is the input of a layer.

    Under autocast the embeddings, and so all following sums, are in FP32.
    """
    autocast: bool
    """Whether eager autocast is on.

    It runs norms, softmax and powers in FP32, keeps the residual stream in FP32, and casts the inputs of products.
    """
    wide_softmax: bool
    """Whether an unfused softmax runs in FP32 and its result is cast to 16 bits.

    That is so under eager autocast, and in models written like LlamaAttention (Hugging Face, eager_attention_forward).
    """
    composed: frozenset[Composed]
    """Operators that run as chains of element-wise kernels, unless a compiler fuses them (`layers.CHAINS`)."""
    promotes: bool
    """Whether some tensors become FP32 in a 16-bit job.

    Eager mixed precision makes them in norms, softmax, and sums with FP32 weights, and casts the inputs of products.
    """
    channels_last: bool
    """Whether images are stored channels last, as tensor-core convolutions read them.

    Other convolutions run between copies.
    """
    flash: bool
    """Whether attention is one fused kernel."""
    fused_gate: bool
    """Whether the gate of an MLP is one kernel. It keeps its two inputs, but no activated copy."""
    loss: Loss
    """Kind of cross-entropy, which determines what it keeps (`layers.logit_bytes`)."""
    loss_chunks: float
    """Number of chunks into which the loss cuts the logits."""
    loss_element: float
    """Bytes of a logit in the loss."""
    returned_copy: float
    """Bytes per logit of the FP32 copy that a training loop gets, beside the logits, if the model returns 16 bits."""
    adds_bias: bool
    """Whether a kernel of its own adds the bias of a dense layer, unless element-wise operators are fused.

    Layers of convolutional networks read two dimensions, for which the product adds it.
    """
    adds_mask: bool
    """Whether a kernel of its own adds the mask to scores of unfused attention."""
    keeps_wide_images: bool
    """Whether a training loop holds images in FP32 while autocast's copies of them in 16 bits are kept."""
    keeps_softmax_input: bool
    """Whether a softmax over pixels keeps its input for the backward pass, besides its output."""
    product_input: float
    """Bytes per element of a matrix product's input that is kept for the gradient of the weight."""
    frozen_input: float
    """Bytes per input element that a product with a frozen weight keeps because the weight is quantized."""
    norm_extra: float
    """Bytes per element that a norm keeps besides its input and its output."""
    chain_extra: float
    """Bytes per element that a norm written with PyTorch's operators keeps besides its input: an FP32 copy.

    The input has the type of activations.
    """
    gelu_extra: float
    """Bytes per element that a GELU keeps besides its input and its output."""
    casts_inputs: bool
    """Whether each product casts its own input, even if other products read the same tensor, as in eager autocast."""
    score_extra: float
    """Further bytes per score that an unfused softmax keeps, in FP32 or in old versions of PyTorch.

    The product after an FP32 softmax reads a 16-bit cast of its output, or of the dropout's output.
    """
    saves_operators: bool
    """Whether selective recomputation keeps attention and every second product, rather than all but attention."""
    fuses_norms: bool
    """Whether a norm is part of the dense product after it, so that it is not recomputed separately."""
    training: bool
    accumulates: bool
    """Whether the GEMM of a weight's gradient adds it to an FP32 buffer, as Megatron's does."""
    image_loss_launches: tuple[float, ...]
    """Kernels per image, forward and backward, in the loss of a one-stage detector."""
    frozen: bool
    """Whether base weights have no gradient (LoRA, a frozen part), so that no GEMMs compute weight gradients."""
    keeps_inputs: bool
    """Whether products of the layers keep their input for the gradient of a weight, or for the adapter beside it."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Passes of a step: forward and, in training, backward."""
        return PHASES if self.training else PHASES[:1]

    @property
    def in_fp32(self) -> Numerics:
        """Copy of the numerics with tensors in FP32."""
        return replace(self, vector="fp32", element=4.0)

    @property
    def unquantized(self) -> Numerics:
        """Copy of the numerics with products in 16 bits, as for router and head of an FP8, MXFP8 or NVFP4 job.

        Sources: Megatron-Core, transformer/moe/router.py, and tensor_parallel/layers.py for output_layer; torchao's
        filter skips `output`.
        """
        return replace(self, matrix=self.vector) if self.matrix in QUANTIZED else self

    @classmethod
    def from_workload(cls, workload: Workload) -> Numerics:
        """Return the numerics of a workload under its framework."""
        passes, framework = fuse.passes(workload), frameworks.find_framework(workload)
        vector = "bf16" if workload.is_quantized else {"tf32": "fp32"}.get(workload.precision, workload.precision)
        element = 4.0 if vector == "fp32" else 2.0
        own_kernels = frameworks.has_fused_kernels(workload)
        # In an FP8 job, hand-written kernels (`fused_kernels`) are those of Transformer Engine.
        keeps_fp8 = workload.is_quantized and (framework.fp8_inputs or own_kernels)
        quantizes = workload.lora_rank > 0 and workload.frozen_bits < 16 and workload.training
        # Hand-written kernels add gradients of weights to FP32 buffers, in frameworks that keep such buffers.
        fuses_accumulation = framework.has_fused_accumulation or (own_kernels and workload.framework is None)
        autocasts = workload.is_mixed and workload.training and framework.weights == "autocast"
        is_narrow = framework.weights == "pure" or (framework.weights == "master" and framework.casts_model)
        score_extra = _count_extra_score_bytes(workload, framework, autocasts)
        return cls(
            matrix=workload.precision,
            vector=vector,
            element=element,
            residual_element=4.0 if autocasts else element,
            autocast=autocasts and "norm" not in passes,
            wide_softmax=score_extra > 0,
            composed=_list_composed(workload, framework),
            promotes=vector in ("fp16", "bf16") and workload.training and "norm" not in passes,
            channels_last=workload.memory_format == "channelsLast",
            flash="attention" in passes,
            fused_gate="elementwise" in passes,
            loss=_choose_loss(workload, framework.loss),
            loss_chunks=framework.loss_chunks,
            loss_element=element if is_narrow and not _upcasts_logits(workload, framework) else 4.0,
            returned_copy=_count_returned_bytes(workload, framework),
            adds_bias=framework.adds_bias and isinstance(workload.model.dimensions, Transformer),
            adds_mask=framework.adds_mask and workload.model.family == "encoder",
            keeps_wide_images=autocasts and frameworks.find_versioned_product(framework.name) == "PyTorch",
            keeps_softmax_input=framework.keeps_softmax_input,
            frozen_input=framework.quantized_input_bytes if quantizes else 0.0,
            product_input=ELEMENT_BYTES[workload.precision] if keeps_fp8 else element,
            norm_extra=_count_extra_norm_bytes(workload, framework, autocasts),
            chain_extra=4.0 if _runs_norms_unfused(workload, framework) else 0.0,
            gelu_extra=_count_extra_gelu_bytes(workload, framework, element, autocasts),
            casts_inputs=autocasts and "elementwise" not in passes,
            score_extra=score_extra + _count_score_input_bytes(workload, framework, wide=score_extra > 0),
            saves_operators=framework.selective == "operators",
            fuses_norms=framework.fuses_norms,
            training=workload.training,
            accumulates=vector != "fp32" and fuses_accumulation and framework.has_fp32_gradients(workload),
            image_loss_launches=framework.image_loss_launches,
            frozen=workload.lora_rank > 0 or "language" in workload.frozen_parts,
            keeps_inputs="language" not in workload.frozen_parts,
        )


def _choose_loss(workload: Workload, usual: Loss) -> Loss:
    """Return the kind of loss of a workload: compiled or hand-written if the job has such a loss, else `usual`."""
    if "loss" in fuse.passes(workload):
        return "fused"
    if frameworks.has_fused_kernels(workload) and usual == "eager":
        # Fused kernels in Hugging Face's Llama and its like read the FP32 logits that these shift and copy. Beside
        # quantized weights autocast makes FP32 logits for them.
        reads_wide = workload.model.rms_norm or workload.frozen_bits < 16
        upcasts = reads_wide and _upcasts_logits(workload, frameworks.find_framework(workload))
        return "upcast" if upcasts else "parallel"
    return usual


def _upcasts_logits(workload: Workload, framework: Framework) -> bool:
    """Return whether the loss reads an FP32 copy of the logits.

    Adapters of quantized weights are trained under autocast, which runs any loss in FP32 (PEFT, tuners/tuners_utils.py:
    autocast_adapter_dtype).
    """
    chosen = framework.upcasts_logits
    return chosen == "all" or (chosen == "llama" and (workload.model.rms_norm or workload.frozen_bits < 16))


def _count_returned_bytes(workload: Workload, framework: Framework) -> float:
    """Return the bytes per logit of the FP32 copy of 16-bit logits that a model returns to the training loop.

    The copy was measured for adapters on quantized weights, in a model whose loss does not convert the logits. In all
    other cases, there are no such bytes.
    """
    leaves = framework.upcasts_logits == "llama" and not workload.model.rms_norm
    return 4.0 if framework.converts_outputs and leaves and workload.frozen_bits < 16 and workload.is_mixed else 0.0


def _count_extra_score_bytes(workload: Workload, framework: Framework, autocasts: bool) -> float:
    """Return the bytes per score that an unfused softmax in FP32 saves in addition to what one in 16 bits saves.

    Autocast runs the softmax in FP32, and so do models written like LlamaAttention (Hugging Face,
    eager_attention_forward).
    """
    if "elementwise" in fuse.passes(workload) or not (workload.is_mixed and workload.training):
        return 0.0
    if autocasts:
        return 2.0 if workload.model.dropout else 4.0
    return 4.0 if _runs_norms_unfused(workload, framework) else 0.0


def _count_score_input_bytes(workload: Workload, framework: Framework, *, wide: bool) -> float:
    """Return the bytes per score of a softmax's input, which old versions of PyTorch save besides its output."""
    if not (framework.keeps_softmax_input and workload.training) or "elementwise" in fuse.passes(workload):
        return 0.0
    return 4.0 if wide or not workload.is_mixed else 2.0


def _list_composed(workload: Workload, framework: Framework) -> frozenset[Composed]:
    """Return the operators that run as chains of element-wise kernels in the framework or in the model's code."""
    dims = workload.model.dimensions
    own: frozenset[Composed] = _HAND_WRITTEN if isinstance(dims, Transformer) and dims.hand_written else frozenset()
    return framework.composed | own


_HAND_WRITTEN: frozenset[Composed] = frozenset(("rmsnorm", "layernorm", "gelu", "tanh-gelu"))
"""Operators that a hand-written model composes."""


def _runs_norms_unfused(workload: Workload, framework: Framework) -> bool:
    composed = workload.model.rms_norm and "rmsnorm" in _list_composed(workload, framework)
    return workload.training and composed and "norm" not in fuse.passes(workload)


def _count_extra_norm_bytes(workload: Workload, framework: Framework, autocasts: bool) -> float:
    """Return the bytes per element that a norm saves for the backward pass besides its input and its output.

    Under autocast, the residual stream, and so the input of a norm, is in FP32: two bytes more. An RMS norm written
    with PyTorch's operators saves an FP32 copy and the normalised input in place of its input: four bytes more. Under
    autocast the normalised input is in FP32 too. Only the gradient of the norm's weight needs the normalised input, so
    a frozen norm saves only the FP32 copy.
    """
    if not workload.training or "norm" in fuse.passes(workload):
        return 0.0
    if workload.lora_rank and _runs_norms_unfused(workload, framework):
        return 2.0
    wide = 2.0 if autocasts else 0.0
    return wide + (4.0 if _runs_norms_unfused(workload, framework) else 0.0)


def _count_extra_gelu_bytes(workload: Workload, framework: Framework, element: float, autocasts: bool) -> float:
    """Return the bytes per element that a GELU in its tanh form saves besides its input and its output.

    If the GELU is written with PyTorch's operators, it saves half its input, the tanh, and the tanh plus one. Autocast
    runs powers in FP32. The GELU then saves an FP32 copy instead of the input, and the tanh and the sum in FP32.
    """
    composed = "tanh-gelu" in _list_composed(workload, framework)
    if not (workload.training and composed) or "elementwise" in fuse.passes(workload):
        return 0.0
    return 12.0 if autocasts else 3 * element
