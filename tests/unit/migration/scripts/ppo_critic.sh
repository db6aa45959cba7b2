set -x
gsm8k=$HOME/data/gsm8k
math=$HOME/data/math
train_files="['$gsm8k/train.parquet', '$math/train.parquet']"

COMMON_TP=${COMMON_TP:-2}

python3 -m verl.trainer.main_ppo --config-path=./config --config-name='ppo_megatron_trainer'\
    algorithm.gamma=1.0 \
    algorithm.lam=0.95 \
    algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl \
    algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0.005 \
    data.train_files="$train_files" \
    data.val_files=null \
    data.train_batch_size=1024 \
    data.max_prompt_length=1024 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path=/models/policy \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$COMMON_TP \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.name=vllm \
    critic.optim.lr=2e-5 \
    critic.model.path=/models/critic \
    critic.ppo_micro_batch_size_per_gpu=8 \
    critic.ppo_epochs=2 \
    critic.megatron.tensor_model_parallel_size=$((COMMON_TP * 2)) \
    trainer.critic_warmup=5 \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.total_training_steps=70
