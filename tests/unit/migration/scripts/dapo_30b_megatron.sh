#!/usr/bin/env bash
# A mixture of experts on Megatron; arguments in arrays, values from the environment.
set -xeuo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1

BACKEND=${BACKEND:-vllm}
QUANT=${QUANT:-}
MODEL_PATH=${MODEL_PATH:-/models/Qwen3-30B-A3B}
MCORE_PATH=${MCORE_PATH:-}
NNODES=${NNODES:-1}
GPUS=${NGPUS_PER_NODE:-${GPUS_PER_NODE:-8}}
max_prompt=${MAX_PROMPT:-$((1024 * 2))}
max_response=${MAX_RESPONSE:-$((1024 * 8))}
tp=${ACTOR_TP:-4} pp=${ACTOR_PP:-2}
vpp=${ACTOR_VPP:-2}
ref_tp=${REF_TP:-${tp}}
name=${NAME:-moe_${BACKEND,,}_megatron${QUANT:+_${QUANT}}}

if [ "${BACKEND}" = vllm ] || [ "${BACKEND}" = sglang ]; then
    seqs=${SEQS:-1024}
else
    seqs=${SEQS:-384}
fi
[ "${pp}" -gt 1 ] && vpp_or_null=${vpp} || vpp_or_null=null

DATA=(
    data.train_files=/data/train.parquet
    data.val_files="['/data/aime.parquet', '/data/math500.parquet']"
    data.train_batch_size=512
    data.max_prompt_length=${max_prompt}
    data.max_response_length=${max_response}
    # data.shuffle=False
    data.truncation=left
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_decay_style=cosine
    actor_rollout_ref.actor.optim.min_lr=1e-7
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${tp}
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=${pp}
    actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=${vpp_or_null}
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=2
    actor_rollout_ref.actor.megatron.param_offload=True
    actor_rollout_ref.actor.megatron.grad_offload=True
    actor_rollout_ref.actor.megatron.optimizer_offload=True
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
    ++actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type="flex"
    ++actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff=0.001
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=${BACKEND}
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    actor_rollout_ref.rollout.max_num_seqs=${seqs}
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=${ref_tp}
)
EXTRA=(model_engine=megatron)
if [ -n "$MCORE_PATH" ]; then
    EXTRA+=(actor_rollout_ref.actor.megatron.dist_checkpointing_path=${MCORE_PATH})
fi
EXTRA+=(algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False)

LAUNCH=(python3)
if [ "${USE_UV:-1}" != 0 ] && { [ "${BACKEND}" = vllm ] || [ "${BACKEND}" = sglang ]; }; then
    LAUNCH=(uv run --extra "${BACKEND}" python3)
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    "${ACTOR[@]}" \
    "${ROLLOUT[@]}" \
    "${EXTRA[@]}" \
    trainer.n_gpus_per_node=${GPUS} trainer.nnodes=${NNODES} \
    trainer.experiment_name="${name}" trainer.total_training_steps=100 \
    "$@"
