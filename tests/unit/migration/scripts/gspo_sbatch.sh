#!/bin/bash
# Writes a job whose script starts the training.
MODEL=/models/moe
BSZ=64
sbatch <<EOF
#!/bin/bash
#SBATCH --nodes=2
srun --overlap env -u X VLLM_USE_V1=1 bash -c "python3 -m verl.trainer.main_ppo \
    data.train_files=/data/train.jsonl data.train_batch_size=${BSZ} \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
    actor_rollout_ref.actor.clip_ratio_low=3e-4 actor_rollout_ref.actor.clip_ratio_high=4e-4 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.name=vllm \
    algorithm.adv_estimator=grpo trainer.nnodes=2 trainer.total_training_steps=10"
EOF
