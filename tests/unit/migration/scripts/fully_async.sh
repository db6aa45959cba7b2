#!/usr/bin/env bash
STRATEGY=${STRATEGY:-megatron}
mode="async"
if [ "$mode" = "async" ]; then
    export VLLM_USE_V1=1
    raw_chat="True"
fi
total=$(((512*400)))
nodes_rollout=${NODES_ROLLOUT:-12}

common=(
    data.train_files="${HOME}/dapo.parquet"
    data.val_files="${HOME}/aime.parquet"
    data.max_prompt_length=2048
    data.max_response_length=8192
    data.train_batch_size=0
    data.gen_batch_size=1
    data.return_raw_chat=${raw_chat}
    actor_rollout_ref.model.path="/models/Qwen3-30B-A3B"
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.calculate_log_probs=True
    actor_rollout_ref.hybrid_engine=False
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10240
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    algorithm.adv_estimator=grpo
    algorithm.rollout_correction.rollout_is=token
    algorithm.rollout_correction.rollout_is_threshold=2.5
    trainer.nnodes=4
    trainer.n_gpus_per_node=8
    rollout.nnodes="${nodes_rollout}"
    rollout.n_gpus_per_node=8
    rollout.total_rollout_steps=${total}
    # freshness
    async_training.staleness_threshold=0.5
    async_training.trigger_parameter_sync_step=4
    async_training.partial_rollout=True
)
if [ "${STRATEGY}" == "fsdp2" ]; then
    python3 -m verl.experimental.fully_async_policy.fully_async_main "${common[@]}" \
        actor_rollout_ref.actor.strategy=fsdp2
elif [ "${STRATEGY}" == "megatron" ]; then
    python3 -m verl.experimental.fully_async_policy.fully_async_main \
        --config-path=config \
        --config-name='fully_async_ppo_megatron_trainer.yaml' \
        "${common[@]}" \
        actor_rollout_ref.actor.strategy=megatron \
        actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
        actor_rollout_ref.actor.megatron.context_parallel_size=2 \
        actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
        actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \
        actor_rollout_ref.rollout.tensor_model_parallel_size=4 "$@"
else
    echo "unknown strategy ${STRATEGY}"
    exit 1
fi
