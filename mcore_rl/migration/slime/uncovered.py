"""Reasons why arguments of slime have no counterpart."""

from __future__ import annotations

from mcore_rl.migration.slime.reader import PROGRAM
from mcore_rl.migration.slime.run import SlimeRun
from mcore_rl.migration.source import Source
from mcore_rl.migration.uncovered import grouped_lines

REASONS = {
    "the model's config.json has the architecture": """
        num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels
        group-query-attention *layernorm* *rotary* *rope* normalization norm-epsilon swiglu *bias-linear *qkv-bias
        vocab-size *vocab-size* *embeddings* num-experts moe-ffn-hidden-size moe-layer-freq moe-router-*
        moe-shared-* multi-latent-attention *lora-rank *head-dim *mscale* mtp-num-layers *-dropout spec
        max-position-embeddings seq-length *attention-gate* *gated-attention model-name attention-output-gate
        apply-layernorm-1p *linear-attention* first-k-dense* position-embedding-type
    """,
    "chosen by this project or Megatron": """
        *-fusion *-in-fp32 attention-backend sequence-parallel moe-grouped-gemm moe-token-drop-policy overlap-*
        use-precision-aware-optimizer transformer-impl bf16 *loss-scale* hysteresis *-dtype no-* make-*
        use-distributed-optimizer
        qwen-gdn-backend use-flash-attn moe-permute* *gemm* distributed-* cross-entropy-* *dist-ckpt* ckpt-format
        deterministic-mode enable-experimental train-backend allgather-cp prefill-num-servers
        attn-implementation megatron-to-hf-mode train-env-vars
    """,
    "chosen by the engine": "sglang-*",
    "metrics.jsonl and responses are always recorded in run.dir": """
        wandb-* tb-* log-* disable-wandb*
    """,
    "sequences are always packed, and work is balanced over ranks": """
        use-dynamic-batch-size balance-* data-pad-size-multiplier qkv-format variable-seq-lengths
    """,
    "profiling and debugging": """
        profile* *-debug-* debug-* memory-* dump-details record-memory* ci-* check-* *nan*
    """,
    "weights are sent by weights.transport": "update-weight*",
    "requests are routed by this project": "*slime-router*",
    "engines restart by rollout.max_engine_restarts": "use-fault-tolerance rollout-health-*",
    "a run resumes from run.dir if it holds one": "start-rollout-id finetune load-* *-ckpt-step",
    "options of a part that this run does not use": """
        opd-* rm-url rollout-buffer-url keep-old-actor ref-micro-batch-size loss-mask-type rollout-function-path
        tis-* custom-* over-sampling* metadata-key tool-key mask-*
    """,
}
"""Reason -> patterns of arguments."""


def list_uncovered(source: Source) -> list[str]:
    """Return one line per reason, and one per unknown argument, for settings that no translation read."""
    return grouped_lines([setting for setting in source.unread() if setting.key != PROGRAM], REASONS)


def block_unsupported(run: SlimeRun) -> None:
    """Add blockers for parts of slime that change what is trained and do not exist here."""
    source, draft = run.source, run.draft
    absent = {
        "use-opd": "distillation is not translated; set teacher.* (docs/distillation.md)",
        "use-opsm": "off-policy sequence masking is not translated; set algorithm.correction (docs/papers.md)",
        "multimodal-keys": "prompts are texts; images are not supported",
        "disable-rewards-normalization": "grpo subtracts the mean of a group; name another algorithm.advantage",
        "custom-loss-function-path": "write algorithm.policy_loss.name=module_or_file.py:function (docs/algorithms.md)",
        "custom-advantage-function-path": "write algorithm.advantage=module_or_file.py:function (docs/algorithms.md)",
        "custom-tis-function-path": "write the correction with algorithm.correction",
        "custom-reward-post-process-path": "write it into reward.function",
        "freeze-params-name-list": "all weights are trained, or adapters (actor.lora)",
        "only-train-params-name-list": "all weights are trained, or adapters (actor.lora)",
    }
    for name, reason in absent.items():
        setting = source.find(name)
        if setting is not None and setting.value not in (None, False):
            draft.block(setting, reason)
