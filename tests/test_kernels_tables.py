import csv
import gzip
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tilecast.graph import KIND_NAMES
from tilecast.hardware import find_gpu
from tilecast.kernels import tiles
from tilecast.spec import SpecError
from tilecast_lab.validate.kernel_readers import read_kernels
from tilecast_lab.validate.kernels import predict, run

GEMM = "source,gpu,dtype,m,n,k,batch,latency_us"
H100 = "NVIDIA H100 80GB HBM3"
TABLES = {
    "gemm": (GEMM, f"x,{H100},bf16,4096,4096,4096,1,200", "gemm"),
    "attention": (
        "gpu,dtype,pass,batch,heads,kv_heads,seq_q,seq_kv,head_dim,causal,latency_us,kernel",
        f"{H100},bf16,bwd,1,32,8,4096,4096,128,1,1400,cudnn",
        "attention backward",
    ),
    "conv": (
        "gpu,dtype,pass,batch,c_in,h,w,c_out,kh,kw,pad_h,pad_w,stride_h,stride_w,latency_us,fwd_algo",
        "Tesla T4,fp16,bwd_data,16,64,56,56,64,3,3,1,1,1,1,300,",
        "conv bwd_data",
    ),
    "convolution of NeuSight": (
        "op,gpu,batch,c_in,c_out,kernel_size,in_hw,stride,padding,latency_us",
        "conv,Tesla T4,40,900,300,3,5,1,1,1500",
        "conv fwd",
    ),
    "NeuSight": (
        "op,gpu,b,m,n,k,h,latency_us,tile_x",
        "softmax,NVIDIA L4,4096,,,,1024,150,",
        "softmax",
    ),
    "layers of Megatron": (
        "gpu,dtype,op,name,pass,model,micro_batch,tp,m,n,k,batch,rows,cols,latency_us",
        "Tesla V100-SXM2-32GB,fp16,gelu,enc-MLP-gelu,bwd,gpt,4,1,,,,,8192,20480,1700",
        "megatron gelu backward",
    ),
    "grouped products": (
        "gpu,dtype,groups,m,n,k,stage,latency_us",
        "NVIDIA A100-PCIE-80GB,bf16,16,1024,4096,2048,bwd_grad_w,1500",
        "grouped gemm weight gradient",
    ),
    "attention of SimuMax": (
        "gpu,dtype,pass,batch,seq,heads,kv_heads,qk_head_dim,v_head_dim,causal,latency_us",
        "NVIDIA A100-PCIE-80GB,bf16,bwd,1,2048,32,32,192,128,1,1000",
        "attention backward",
    ),
    "rows": (
        "gpu,dtype,op,pass,rows,cols,bytes,latency_us,impl",
        "NVIDIA H200,bf16,rms_norm,bwd,16384,5000,,280,pytorch",
        "rms_norm backward",
    ),
    "Liger": (
        "gpu,dtype,op,pass,x_name,x_value,config_json,latency_us,impl",
        'NVIDIA A100-SXM4-80GB,fp32,layer_norm,full,N,4096,"{""M"": 4096}",300,liger',
        "layer_norm",
    ),
}


def table(path: Path, header: str, *rows: str) -> Path:
    text = "\n".join([header, *rows]) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_the_kind_of_a_table_shows_in_its_columns(kind, name, tmp_path):
    header, row, op = TABLES[kind]
    rows = read_kernels(table(tmp_path / name, header, row))
    assert rows.op == [op]
    predicted = predict(rows)
    assert predicted.reason == [""]
    assert 0 < predicted.lower[0] <= predicted.seconds[0] <= predicted.upper[0]
    assert predicted.seconds[0] == pytest.approx(rows.latency_s[0], rel=0.6)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("x,GeForce 256,bf16,8,8,8,1,5", "unknown-gpu"),
        ("x,Tesla T4,bf16,8,8,8,1,5", "no-such-precision"),
        ("x,Tesla T4,int4,8,8,8,1,5", "unknown-precision"),
        ("x,Tesla T4,fp16,nan,8,8,1,5", "bad-number"),
        ("x,Tesla T4,fp16,0,8,8,1,5", "bad-number"),
        ("x,Tesla T4,fp16,eight,8,8,1,5", "bad-number"),
        ("x,Tesla T4", "unknown-precision"),
    ],
)
def test_a_row_that_cannot_be_priced_says_why(row, reason, tmp_path):
    predicted = predict(read_kernels(table(tmp_path / "t.csv", GEMM, row, f"x,{H100},bf16,64,64,64,1,5")))
    assert predicted.reason == [reason, ""]
    assert np.isnan(predicted.seconds).tolist() == [True, False]


MEGATRON = "gpu,dtype,op,name,pass,tp,m,n,k,batch,rows,cols,latency_us"


@pytest.mark.parametrize(
    ("row", "kinds"),
    [
        ("fp16,linear,enc-attention-dense,fwd,4,1024,512,256,1,,,80", ["gemm"]),
        ("fp16,linear,enc-attention-qkv,fwd,1,1024,768,256,1,,,80", ["gemm", "elementwise"]),
        ("fp16,linear,enc-MLP-GEMM-2,bwd,1,1024,256,1024,1,,,120", ["gemm", "gemm"]),
        ("fp16,bmm,enc-attention-score,bwd,2,256,256,64,16,,,120", ["gemm", "gemm"]),
        ("fp16,bias_dropout_add,enc-post-MLP-dropout,fwd,1,,,,,1024,256,70", ["elementwise"] * 3),
        ("fp16,scaled_causal_softmax,enc-attention-softmax,fwd,1,,,,,8192,2048,100", ["softmax"]),
    ],
)
def test_an_operator_of_megatron_is_all_its_kernels(row, kinds, tmp_path):
    rows = read_kernels(table(tmp_path / "t.csv", MEGATRON, f"Tesla V100-SXM2-32GB,{row}"))
    assert rows.reason == [""]
    assert [KIND_NAMES[code] for code in rows.kernels.kind] == kinds


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("fp16,linear,enc-MLP-GEMM-1,bwd,4,1024,512,256,1,,,80", "composite-op"),
        ("fp16,layer_norm,final-layernorm,fwd,1,,,,,1024,256,50", "composite-op"),
        ("fp16,scaled_causal_softmax,enc-attention-softmax,fwd,1,,,,,20480,2048,2000", "composite-op"),
        ("fp32,scaled_causal_softmax,enc-attention-softmax,fwd,1,,,,,8192,2048,2000", "composite-op"),
        ("fp16,bmm,enc-attention-score,fwd,1,256,256,64,16,,,10000000", "did-not-run"),
    ],
)
def test_an_operator_of_megatron_that_is_more_than_its_kernels_is_refused(row, reason, tmp_path):
    rows = read_kernels(table(tmp_path / "t.csv", MEGATRON, f"Tesla V100-SXM2-32GB,{row}"))
    assert rows.reason == [reason]


def test_the_three_products_of_an_expert_have_the_same_flops(tmp_path):
    header = "gpu,dtype,groups,m,n,k,stage,latency_us"
    rows = [f"{H100},bf16,8,512,2048,1024,{stage},100" for stage in ("fwd", "bwd_grad_act", "bwd_grad_w")]
    lines = read_kernels(table(tmp_path / "t.csv", header, *rows))
    assert len(set(lines.kernels.flops())) == 1
    forward, back, weight = lines.kernels.bytes()
    assert forward == back
    assert weight == forward + 8 * 2048 * 1024 * (8 - 2)


def test_rows_come_back_in_order_with_four_columns_more(tmp_path):
    rows = [f"x,{H100},bf16,{m},64,64,1,5" for m in (1, 2, 3)] + ["x,nobody,bf16,1,1,1,1,5"]
    run([table(tmp_path / "t.csv", GEMM, *rows)], tmp_path / "out.csv", None)
    with (tmp_path / "out.csv").open(newline="") as file:
        lines = list(csv.reader(file))
    assert lines[0] == [*GEMM.split(","), "predicted_us", "lower_us", "upper_us", "reason"]
    assert [line[:8] for line in lines[1:]] == [row.split(",") for row in rows]
    assert lines[4][8:] == ["", "", "", "unknown-gpu"]
    assert all(float(line[9]) <= float(line[8]) <= float(line[10]) for line in lines[1:4])


def test_measured_columns_do_not_reach_the_prediction(tmp_path):
    header = GEMM + ",tile_x,latency_min_us"
    one = predict(read_kernels(table(tmp_path / "a.csv", header, f"x,{H100},bf16,512,512,512,1,5,128,4")))
    two = predict(read_kernels(table(tmp_path / "b.csv", header, f"x,{H100},bf16,512,512,512,1,99,64,98")))
    assert one.seconds == two.seconds


ATTENTION = "gpu,dtype,pass,batch,heads,kv_heads,seq_q,seq_kv,head_dim,causal,latency_us,kernel"


def predict_attention(tmp_path, *, kernel, gpu=H100, kv_heads=8, seq=4096, causal=1):
    row = f"{gpu},bf16,fwd,1,32,{kv_heads},{seq},{seq},128,{causal},1400,{kernel}"
    return predict(read_kernels(table(tmp_path / "attention.csv", ATTENTION, row))).seconds[0]


def test_tensorrt_llm_packs_no_heads_that_share_keys_on_hopper(tmp_path):
    few, many = (predict_attention(tmp_path, kernel="trtllm:torch_flow", kv_heads=heads) for heads in (8, 32))
    assert few == many
    assert predict_attention(tmp_path, kernel="sglang:fa3", kv_heads=8) < few
    a100 = {"kernel": "trtllm:torch_flow", "gpu": "NVIDIA A100-SXM4-80GB"}
    assert predict_attention(tmp_path, **a100, kv_heads=8) < predict_attention(tmp_path, **a100, kv_heads=32)


def test_encoder_kernels_are_slow_on_hopper_only_if_they_run_for_long(tmp_path):
    def slowdown(seq):
        kernels = ("sglang:flash_attention_v3", "vllm:cudnn")
        slow, fast = (predict_attention(tmp_path, kernel=kernel, seq=seq, causal=0, kv_heads=32) for kernel in kernels)
        return slow / fast

    assert slowdown(256) == 1.0
    assert 1.0 < slowdown(4096) < slowdown(16384) < 1.9


@pytest.mark.parametrize(
    ("kernel", "dtype", "least_us"),
    [
        ("DeepGemmFp8BlockScaledMMKernel", "fp8_block", 86.0),
        ("CutlassFp8BlockScaledMMKernel", "fp8_block", 178.0),
        ("torch_flow", "fp8", 12.9),
        ("torch_flow", "fp8_block", 0.0),
        ("sglang_sgl_kernel_fp8_scaled_mm", "fp8", 0.0),
    ],
)
def test_the_host_limits_small_products_in_fp8_by_library(kernel, dtype, least_us, tmp_path):
    rows = [f"x,{H100},{dtype},{side},{side},{side},1,200,{kernel}" for side in (128, 16384)]
    small, large = predict(read_kernels(table(tmp_path / "gemm.csv", f"{GEMM},kernel", *rows))).seconds * 1e6
    assert small == pytest.approx(least_us) if least_us else small < 12.9
    assert large > 5000.0


def test_deepgemm_is_faster_than_the_products_that_are_priced(tmp_path):
    kernels = ("sglang_deepgemm_gemm_nt_f8f8bf16", "sglang_sgl_kernel_fp8_scaled_mm")
    rows = [f"x,{H100},fp8,4096,4096,4096,1,200,{kernel}" for kernel in kernels]
    fast, priced = predict(read_kernels(table(tmp_path / "gemm.csv", f"{GEMM},kernel", *rows))).seconds
    assert fast == pytest.approx(0.85 * priced)


def test_phi_2_adds_to_the_residual_twice(tmp_path):
    header = "source,gpu,dtype,op,pass,rows,cols,latency_us,impl"
    rows = [
        f"{source},NVIDIA A100 80GB,fp16,add,fwd,8192,{cols},80,"
        for source, cols in (("vidur", 2560), ("vidur", 5120), ("cudnn", 2560))
    ]
    lines = read_kernels(table(tmp_path / "rows.csv", header, *rows))
    assert np.bincount(lines.owner).tolist() == [2, 1, 1]


def test_the_summary_states_errors_and_what_was_left_out(tmp_path):
    text = run(
        [table(tmp_path / "t.csv", GEMM, f"x,{H100},bf16,4096,4096,4096,1,200", "x,?,bf16,1,1,1,1,1")], None, None
    )
    assert "gemm" in text
    assert H100 in text
    assert "unknown-gpu 1" in text


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.csv", b"a,b\n1,2\n", "no known kernel table"),
        ("t.csv.gz", b"not gzip", "cannot be read"),
        ("t.csv", b"", "no known"),
    ],
)
def test_a_file_that_is_no_kernel_table_is_refused(name, content, says, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SpecError, match=says):
        read_kernels(tmp_path / name)


def data() -> Path:
    folder = os.environ.get("TILECAST_DATA")
    if not folder:
        pytest.skip("TILECAST_DATA names no folder with measured tables")
    return Path(folder)


CEILINGS = [
    ("kernels/aiconfigurator/gemm_bf16.csv.gz", "gemm", "NVIDIA A100-SXM4-80GB", 0.055),
    ("kernels/aiconfigurator/gemm_bf16.csv.gz", "gemm", "NVIDIA H100 80GB HBM3", 0.04),
    ("kernels/aiconfigurator/gemm_bf16.csv.gz", "gemm", "NVIDIA L40S", 0.07),
    ("kernels/cudnn_frontend/attention.csv", "attention backward", "NVIDIA H200", 0.15),
    ("second/kernels/simumax_attention.csv", "attention", "NVIDIA A100-PCIE-80GB", 0.08),
    ("second/kernels/simumax_attention.csv", "attention backward", "NVIDIA A100-PCIE-80GB", 0.08),
    ("second/kernels/simumax_gemm.csv", "gemm accumulating", "NVIDIA A100-PCIE-80GB", 0.06),
    ("second/kernels/aceso_gemm.csv", "gemm", "Tesla V100-SXM2-32GB", 0.08),
    ("second/kernels/aceso_ops_fwd_bwd.csv.gz", "megatron dropout", "Tesla V100-SXM2-32GB", 0.05),
    ("neusight/kernels_test.csv.gz", "linear", "NVIDIA L4", 0.12),
    ("neusight/kernels_test.csv.gz", "linear", "NVIDIA H100 80GB HBM3", 0.05),
    ("neusight/kernels_test.csv.gz", "bmm", "NVIDIA A100 80GB PCIe", 0.06),
    ("neusight/kernels_test.csv.gz", "add", "NVIDIA L4", 0.06),
    ("neusight/kernels_test.csv.gz", "ln", "Tesla V100-PCIE-32GB", 0.12),
]
"""Mean errors of the shipped model that its card states, rounded up; a larger error means that it became worse."""


@cache
def predicted_lines(file):
    """Return a measured table and the forecast seconds of its rows."""
    lines = read_kernels(data() / file)
    return lines, predict(lines).seconds


@pytest.mark.data
@pytest.mark.parametrize(("file", "op", "gpu", "ceiling"), CEILINGS)
def test_the_shipped_model_keeps_its_accuracy(file, op, gpu, ceiling):
    lines, seconds = predicted_lines(file)
    rows = (np.array(lines.op) == op) & (np.array(lines.gpu) == gpu)
    assert rows.sum() > 5
    assert np.nanmean(np.abs(seconds[rows] / lines.latency_s[rows] - 1)) < ceiling


@pytest.mark.data
def test_chosen_tiles_are_of_the_recorded_size():
    lines = read_kernels(data() / "neusight/kernels_test.csv.gz")
    place = {name: lines.header.index(name) for name in ("m", "n", "k", "b", "tile_x", "tile_y")}
    rows = [i for i, row in enumerate(lines.cells) if lines.op[i] == "bmm" and row[place["tile_x"]]]
    gpus = np.array([lines.gpu[i] for i in rows])
    columns = [np.array([float(lines.cells[i][place[name]]) for i in rows]) for name in place]
    m, n, k, b, width, height = columns
    ratio = np.zeros(len(rows))
    for name in set(gpus):
        here = gpus == name
        tiling = tiles.choose_tiling(m[here], n[here], k[here], b[here], find_gpu(name), "simt")
        ratio[here] = tiling.rows * tiling.cols / (width[here] * height[here])
    assert np.mean((ratio >= 0.5) & (ratio <= 2.0)) > 0.85
