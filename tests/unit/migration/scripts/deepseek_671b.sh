#!/usr/bin/env bash
# 256 GPUs; one switch decides about all offloading.
DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "${DIR}/cluster.env"

ALL=${ALL_OFFLOAD:-True}
PARAM=${PARAM_OFFLOAD:-$ALL}
OPTIM=${OPTIM_OFFLOAD:-$ALL}
PP=16; EP=16; TP=1

config="
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$PP \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$TP \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=$EP \
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
"
RAY_ADDRESS='auto' python3 -m verl.trainer.main_ppo --config-path=./config --config-name='ppo_megatron_trainer.yaml' \
    algorithm.adv_estimator=grpo \
    data.train_files=/data/train.parquet \
    data.val_files=/data/test.parquet \
    data.train_batch_size=512 \
    data.max_prompt_length=2048 \
    data.max_response_length=4096 \
    actor_rollout_ref.model.path="${MODELS}/DeepSeek-V3" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=32 \
    $config \
    actor_rollout_ref.actor.megatron.param_offload=${PARAM} \
    actor_rollout_ref.actor.megatron.grad_offload=${PARAM} \
    actor_rollout_ref.actor.megatron.optimizer_offload=${OPTIM} \
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=4 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=1 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    actor_rollout_ref.actor.router_replay.mode=R3 \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=$NODES \
    trainer.total_training_steps=300 \
    trainer.total_epochs=100 $@
