# Multi-turn tool calls; values in a base configuration beside the script.
ulimit -n 65535
PROJECT_DIR="$(pwd)"
function start() {
    local engine=${1:-vllm}
    shift
    python3 -m verl.trainer.main_ppo \
        --config-path="$PROJECT_DIR/config" --config-name='tools_base' \
        algorithm.adv_estimator=grpo \
        data.return_raw_chat=True \
        actor_rollout_ref.model.path=/models/chat \
        actor_rollout_ref.actor.ppo_mini_batch_size=64 \
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
        actor_rollout_ref.rollout.name=$engine \
        actor_rollout_ref.rollout.mode=async \
        actor_rollout_ref.rollout.n=16 \
        actor_rollout_ref.rollout.multi_turn.tool_config_path="$PROJECT_DIR/tools.yaml" \
        custom_reward_function.path=my_reward.py \
        custom_reward_function.name=score \
        +custom_reward_function.reward_kwargs.bonus=0.5 \
        +data.apply_chat_template_kwargs.enable_thinking=False \
        trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.total_training_steps=20 "$@"
}
start sglang ~actor_rollout_ref.rollout.gpu_memory_utilization trainer.test_freq=20
