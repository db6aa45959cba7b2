#!/usr/bin/env bash
# Trainer and engines share each of the two nodes.
per_node=8
engines=2
training=$((per_node - engines))
python3 -m verl.experimental.one_step_off_policy.main_ppo --config-name=one_step_off_ppo_megatron_trainer.yaml \
    data.train_files=/data/train.parquet data.val_files=/data/test.parquet \
    data.train_batch_size=96 data.max_prompt_length=512 data.max_response_length=1024 \
    actor_rollout_ref.model.path=/models/Qwen3-30B-A3B \
    actor_rollout_ref.actor.strategy=megatron \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=48 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    algorithm.adv_estimator=rloo \
    trainer.nnodes=2 trainer.n_gpus_per_node=${training} trainer.total_training_steps=50 \
    rollout.nnodes=2 rollout.n_gpus_per_node=${engines}
