#!/bin/bash
# Pretraining of Llama 3 8B by Megatron-LM on two nodes of eight GPUs.
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8

TP=${TP:-4}
MODEL_ARGS=(
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
  --num-attention-heads 32 --group-query-attention --num-query-groups 8
  --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
  --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
  --seq-length 8192 --max-position-embeddings 8192
)
TRAINING_ARGS=(
  --micro-batch-size 1 --global-batch-size 128 --bf16 --lr 3e-4 --train-iters 10000
  --tensor-model-parallel-size "$TP" --sequence-parallel
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --rdzv-endpoint "$(hostname):29500" --rdzv-backend c10d \
  pretrain_gpt.py "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}"
