"""Reasons why keys of verl have no counterpart."""

from __future__ import annotations

from mcore_rl.migration.draft import Draft
from mcore_rl.migration.source import Setting, Source
from mcore_rl.migration.uncovered import grouped_lines, matches
from mcore_rl.migration.verl.defaults import ACTOR

REASONS = {
    "metrics.jsonl and responses are always recorded in run.dir": """
        *.prometheus.* trainer.log_val_generations trainer.rollout_data_dir
        trainer.validation_data_dir *.trace.*
    """,
    "profiling": "*profiler* *npu_profile* *.profile_* skip.*",
    "a run resumes from run.dir if it holds one": """
        trainer.resume* trainer.del_local_ckpt_after_load *.load_contents
    """,
    "checkpoints always hold weights, optimizer and position": """
        *.save_contents *.checkpoint.contents *.checkpoint.strict
    """,
    "forward passes use tokens_per_microbatch too": """
        *.log_prob_micro_batch_size* *.log_prob_max_token_len_per_gpu *.log_prob_use_dynamic_bsz
        *.forward_max_token_len_per_gpu *.forward_micro_batch_size* critic.use_dynamic_bsz
    """,
    "sequences are always packed without padding": """
        *remove_padding *pad_mode *.pad_to_length* *.pad_bshd* *.seq_balance*
    """,
    "work is always balanced over ranks": "trainer.balance_batch data.balance_dp_token",
    "the reference has the layout of the actor's ranks": "actor_rollout_ref.ref.*",
    "checkpoints are read from Hugging Face directories": """
        *dist_checkpointing* *dist_ckpt* *mbridge* *.load_format *.use_shm *.trust_remote_code *.external_lib
    """,
    "the engine's log-probabilities are always recorded": "*.calculate_log_probs *.enable_rollout_routing_replay",
    "chosen by this project or Megatron": """
        *override_transformer_config* *override_ddp_config* *override_optimizer_config*
        *override_mcore_model_config* *.override_config* *fused_kernel* *.use_torch_compile *.attn_implementation
        *entropy_* *.use_liger *.dtype *.entropy_from_logits* *.use_megatron_fsdp *.lr_warmup_init *.lr_decay_steps
        *.total_training_steps *.use_mbridge *.sequence_parallel *.enable_activation_offload
        *.enable_gradient_checkpointing *.data_loader_seed *.veomni.* *.freeze_vision* *.tiled_mlp*
        *.use_prefix_grouper *.enable_activation_offloading *.torch_dtype *.megatron.seed *.calculate_entropy
        *.actor.shuffle trainer.worker_env.*
    """,
    "settings of other training backends": "*.torchtitan.* *.veomni.* *.turbo_config.* *.engine.* engine.*",
    "settings of FSDP": """
        *fsdp* *.wrap_policy* *.strategy *model_engine engine actor@* *.ulysses_sequence_parallel_size strategy
    """,
    "chosen by the engine": """
        *.engine_kwargs* *.enable_chunked_prefill *.enable_prefix_caching *.free_cache_engine *.max_model_len
        *.disable_log_stats *.cudagraph_capture_sizes *.multi_stage_wake_up *.ignore_eos *.rollout.mode
        *.rollout.dtype
        *.update_weights* *.server.* *.sglang_rollout_mode *.layered_summon *.skip_tokenizer_init *.scheduling_policy
        *.do_sample *.quantization* *.rollout.seed *.logprobs_mode
        *.checkpoint_engine.* *.moe_tensor_parallel_size
    """,
    "graders of rows run in reward.workers processes": """
        reward*.num_workers *.agent.num_workers reward*.max_concurrent
    """,
    "Ray is started by this project": "ray_kwargs.* ray_init.* *timeout* trainer.ray_wait*",
    "the reward model has its own section (reward_model.*)": "reward_model.* reward.reward_model.*",
    "graders count the limits of the response": "*.max_resp_len *.reward_kwargs.*",
    "reading of the data": """
        data.return_* data.dataloader_num_workers data.num_workers data.gen_batch_size data.val_batch_size
        *.image_key *.video_key *.image_patch_size data.train_max_samples data.validation_shuffle data.*_key
        data.*_dict_keys
    """,
    "parts of verl's implementation": """
        trainer.use_* trainer.v1.* transfer_queue.* async_resources.* async_training.* rollout.test_freq
        *.agent.agent_loop_manager_class data.ignore_input_ids_mismatch *.nccl_timeout *.enable_sleep_mode
        *.over_sample_rate *.disaggregation.* rollout.* *.rollout.nnodes *.rollout.n_gpus_per_node
        reward.reward_manager.*
    """,
    "multi-token prediction: see actor.mtp_loss_coefficient": "*.mtp.*",
    "adapters: see actor.lora": "*.lora.* *.exclude_modules *.lora_* *.target_modules",
    "distillation has other keys: see teacher.hf_path": "distillation.*",
    "quantization-aware training in verl's formats does not exist here": "*.qat.*",
    "options of other optimizers and schedules": """
        *.muon_* *.optimizer_impl *.num_cycles *.weight_decay_incr_style *.lr_wsd_decay_style *.zero_indexed_step
        *.main_grads_dtype *.exp_avg_dtype *.exp_avg_sq_dtype
    """,
    "the sandbox has its own section (sandbox.*)": "reward*.sandbox_fusion.*",
    "options of a part that this run does not use": """
        *.multi_turn.* *.clip_ratio* *.policy_loss.* *.actor.tau_* algorithm.* optim.*
        model data.use_dynamic_bsz data.max_token_len_per_gpu data.filter_overlong_prompts* data.custom_cls.*
    """,
    "roles are part of the configuration": "*.hybrid_engine critic.* model_engine optim critic.enable",
}
"""Reason -> patterns of keys."""
IGNORED = ("*._target_", "hydra.*", "defaults", "*.rollout_n")
"""Keys of Hydra."""
QUANTIZED = (f"{ACTOR}.qat.enable", f"{ACTOR}.megatron.qat.enable")
MULTIMODAL = {"data.video_key": "videos", "data.audio_key": "audios"}
"""Key of a column -> its default."""


def list_uncovered(source: Source) -> list[str]:
    """Return one line per reason, and one per unknown key, for settings that no translation read."""
    return grouped_lines(
        [each for each in source.unread() if not matches(each.key, IGNORED) and not _is_default(source, each)], REASONS
    )


def block_unsupported(source: Source, draft: Draft) -> None:
    """Add blockers for parts of verl that change what is trained and do not exist here."""
    if source.flag("distillation.enabled"):
        draft.block(
            source.effective("distillation.enabled"),
            "distillation is not translated; set teacher.* (docs/distillation.md)",
        )
    for key in QUANTIZED:
        if source.flag(key):
            draft.block(source.effective(key), "quantization-aware training in verl's formats does not exist here")
    for key, name in MULTIMODAL.items():
        setting = source.effective(key)
        # A complete YAML file has the default names also for prompts that are texts.
        if source.text(key) is not None and (setting.line is not None or setting.value != name):
            draft.block(setting, "prompts have texts and images; videos and audio are not supported")


def _is_default(source: Source, setting: Setting) -> bool:
    """Return True for keys of a complete YAML file that are off or at verl's default."""
    return setting.line is None and (
        setting.value in (None, False, {}, [], "", -1) or source.defaults.get(setting.key) == setting.value
    )
