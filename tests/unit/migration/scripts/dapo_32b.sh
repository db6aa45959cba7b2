#!/usr/bin/env bash
# DAPO on a dense model, submitted to a running Ray cluster.
set -euo pipefail

project=dapo
run_name=dapo-dense-32b

# Lengths in tokens
prompt_len=$((1024 * 2))
response_len=$((1024 * 20)) # long answers
longest=$((prompt_len + response_len))
buffer_len=$((1024 * 4))

bsz=512
gen_bsz=$((bsz * 3))
mini=32
n=16

NNODES=${NNODES:-16}
ROOT=${ROOT:-"${HOME}/work"}
MODEL=${MODEL:-"${ROOT}/models/dense-32b"}
TRAIN=${TRAIN:-"${ROOT}/data/dapo-math-17k.parquet"}
TEST=${TEST:-"${ROOT}/data/aime-2024.parquet"}
sp=8
offload=True

ray job submit --no-wait --address="${RAY_ADDRESS:-http://127.0.0.1:8265}" \
    --runtime-env-json='{"working_dir": ".", "env_vars": {"A": "b=c"}}' \
    -- python3 -m recipe.dapo.main_dapo \
    data.train_files="${TRAIN}" \
    data.val_files="${TEST}" \
    data.prompt_key=prompt \
    data.truncation='left' \
    data.max_prompt_length=${prompt_len} \
    data.max_response_length=${response_len} \
    data.gen_batch_size=${gen_bsz} \
    data.train_batch_size=${bsz} \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    algorithm.kl_ctrl.kl_coef=0.0 \
    algorithm.filter_groups.enable=True \
    algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=10 \
    actor_rollout_ref.model.path="${MODEL}" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.loss_agg_mode="token-mean" \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=${mini} \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((longest / 8)) \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=${sp} \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.grad_clip=1.0 \
    actor_rollout_ref.actor.fsdp_config.param_offload=${offload} \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=${offload} \
    actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 \
    actor_rollout_ref.ref.ulysses_sequence_parallel_size=${sp} \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=${n} \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.top_p=1.0 \
    actor_rollout_ref.rollout.top_k=-1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.80 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.max_num_batched_tokens=${longest} \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.n=32 \
    reward_model.reward_manager=dapo \
    reward_model.overlong_buffer.enable=True \
    reward_model.overlong_buffer.len=${buffer_len} \
    reward_model.overlong_buffer.penalty_factor=1.0 \
    trainer.logger='["console","wandb"]' \
    trainer.project_name="${project}" \
    trainer.experiment_name="${run_name}" \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes="${NNODES}" \
    trainer.val_before_train=True \
    trainer.test_freq=5 \
    trainer.save_freq=5 \
    trainer.total_epochs=1 \
    trainer.resume_mode=auto
