#!/bin/bash
# Restarts the cluster, then trains a mixture of experts.
pkill -9 sglang
ray stop --force
set -ex
LINKS=$(nvidia-smi topo -m | grep -c NV)
if [ "$LINKS" -gt 0 ]; then NVLINK=1; else NVLINK=0; fi

SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/moe.sh"

CKPT_ARGS=(
   --hf-checkpoint /models/Qwen3-30B-A3B
   #--hf-checkpoint /models/Qwen3-30B-A3B-FP8
   --ref-load /ckpt/moe_torch_dist
   --save /ckpt/moe_slime/
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data /data/dapo.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 0.8

   --over-sampling-batch-size 64
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
   --global-batch-size 128
   --balance-data
)
EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime /data/aime.jsonl math /data/math.jsonl
   --n-samples-per-eval-prompt 16
   --eval-top-p 0.7
)
PERF_ARGS=(
   --tensor-model-parallel-size 4
   --sequence-parallel
   --context-parallel-size 2
   --expert-model-parallel-size 8
   --expert-tensor-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   # --micro-batch-size 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 4096
)
GRPO_ARGS=(
   --advantage-estimator gspo
   --use-kl-loss
   --kl-loss-coef 0.001
   --kl-loss-type low_var_kl
   --eps-clip 3e-4
   --eps-clip-high 4e-4
   --use-tis
)
OPTIMIZER_ARGS=(
   --lr 1e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta2 0.98
   --optimizer-cpu-offload
)
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 8
   --sglang-mem-fraction-static 0.7
   --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 256)
)
RUNTIME_ENV_JSON="{
  \"env_vars\": {\"NCCL_NVLS_ENABLE\": \"${NVLINK}\"}
}"
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py \
   --actor-num-nodes 2 \
   --actor-num-gpus-per-node 8 \
   --colocate \
   ${MODEL_ARGS[@]} \
   ${CKPT_ARGS[@]} \
   ${ROLLOUT_ARGS[@]} \
   ${OPTIMIZER_ARGS[@]} \
   ${GRPO_ARGS[@]} \
   ${PERF_ARGS[@]} \
   ${EVAL_ARGS[@]} \
   ${SGLANG_ARGS[@]}
