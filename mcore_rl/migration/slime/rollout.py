"""slime's rollout arguments: engines, sampling, dynamic sampling, tools."""

from __future__ import annotations

from mcore_rl.migration.draft import Row
from mcore_rl.migration.slime.run import FULLY_ASYNCHRONOUS, PROMPT_TOKENS, SlimeRun

UNLIMITED_BATCHES = 1000
NONZERO_STD = "check_reward_nonzero_std"
ATTENTION_LAYOUT = (
    "sglang-dp-size",
    "sglang-data-parallel-size",
    "sglang-moe-dense-tp-size",
    "sglang-enable-dp-lm-head",
)
"""Arguments that rollout.data_parallel_attention sets: every GPU of an engine is a data-parallel rank."""
ROWS = (
    Row("rollout.samples_per_prompt", ("n-samples-per-prompt",)),
    Row("rollout.temperature", ("rollout-temperature",)),
    Row("rollout.max_response_tokens", ("rollout-max-response-len",)),
    Row("rollout.stop", ("rollout-stop",)),
    Row("rollout.gpu_memory_fraction", ("sglang-mem-fraction-static",)),
    Row("rollout.max_concurrent_requests", ("sglang-server-concurrency", "sglang-max-running-requests")),
)


def translate_rollout(run: SlimeRun) -> None:
    """Translate sampling, limits, validation and dynamic sampling."""
    source, draft = run.source, run.draft
    draft.apply(source, ROWS)
    draft.set("rollout.engine", "sglang", "slime's only engine")
    if source.flag("sglang-disable-cuda-graph"):
        draft.take(source, "rollout.enforce_eager", True, "sglang-disable-cuda-graph")
    if source.flag("sglang-enable-fp32-lm-head"):
        draft.take(source, "model.float32_head", True, "sglang-enable-fp32-lm-head")
    _translate_engine_layout(run)
    _translate_truncation(run)
    # An argument of slime's forks.
    key = "rollout-repetition-penalty"
    if (setting := source.find(key)) is not None and (value := source.number(key)) != 1:
        draft.block(setting, "training samples from the unchanged softmax; set it to 1")
        draft.take(source, "rollout.validation_repetition_penalty", value, key, note="as in training")
    _translate_limits(run)
    _translate_validation(run)
    _translate_dynamic_sampling(run)
    for key in ("custom-generate-function-path", "rollout-function-path", "data-source-path", "buffer-filter-path"):
        setting = source.find(key)
        if setting is not None and FULLY_ASYNCHRONOUS not in str(setting.value):
            draft.choices.append(
                f"{setting.shown}: write this as rollout.episode (docs/episodes.md) or data.curriculum"
            )


def _translate_truncation(run: SlimeRun) -> None:
    """Translate sampling from a part of the vocabulary, whose sets the trainer then uses."""
    source, draft = run.source, run.draft
    top_p, top_k = source.number("rollout-top-p"), source.integer("rollout-top-k")
    # An argument of slime's forks.
    min_p = source.number("rollout-min-p") if source.find("rollout-min-p") is not None else 0
    found = {"top_p": (top_p, top_p < 1), "top_k": (top_k, top_k > 0), "min_p": (min_p, min_p > 0)}
    used = {f"rollout-{name.replace('_', '-')}": (name, value) for name, (value, cuts) in found.items() if cuts}
    for key, (name, value) in used.items():
        draft.take(source, f"rollout.{name}", value, key)
    if min_p:
        draft.take(source, "rollout.validation_min_p", min_p, "rollout-min-p", note="as in training")
    if used:
        draft.set("rollout.keep_sampling_mask", True, "for exact log-probabilities")
        draft.changes.append(
            f"{source.effective(next(iter(used))).shown}: slime normalizes log-probabilities over the whole "
            "vocabulary; here the trainer normalizes over the tokens that the engine sampled from "
            "(rollout.keep_sampling_mask)"
        )


def _translate_engine_layout(run: SlimeRun) -> None:
    source, draft = run.source, run.draft
    sizes = ("sglang-ep-size", "sglang-expert-parallel-size")
    flags = ("sglang-enable-ep-moe", "sglang-enable-deepep-moe")
    attention = ("sglang-enable-dp-attention", "sglang-attn-dp-size")
    parallel_attention = source.flag(attention[0]) or source.integer(attention[1]) > 1
    spread = parallel_attention or source.integer(*sizes) > 1 or any(source.flag(flag) for flag in flags)
    source.find(*flags, *attention, *ATTENTION_LAYOUT)
    if source.integer("rollout-num-gpus-per-engine") <= 1:
        return
    if spread:
        draft.take(source, "rollout.expert_parallel", True, *sizes, *flags, *attention)
    if parallel_attention:
        draft.take(source, "rollout.data_parallel_attention", True, *attention)


def _translate_limits(run: SlimeRun) -> None:
    """Translate the prompt limit; without one, slime samples from every prompt."""
    source, draft = run.source, run.draft
    context, prompt = source.integer("rollout-max-context-len"), source.integer("rollout-max-prompt-len")
    if prompt:
        draft.take(source, "rollout.max_prompt_tokens", prompt, "rollout-max-prompt-len")
    else:
        draft.set("rollout.max_prompt_tokens", PROMPT_TOKENS, "slime has no limit without --rollout-max-prompt-len")
        draft.choices.append(
            f"rollout.max_prompt_tokens={PROMPT_TOKENS}: slime has no limit without --rollout-max-prompt-len; longer "
            "prompts are dropped here"
        )
    if context:
        setting = source.effective("rollout-max-context-len")
        draft.changes.append(f"{setting.shown} bounds prompt and response together; here each has its own limit")
        if not source.is_set("rollout-max-response-len"):
            length = max(context - draft.integer("rollout.max_prompt_tokens"), 1)
            draft.take(source, "rollout.max_response_tokens", length, "rollout-max-context-len", note="less the prompt")
    if source.is_set("rollout-stop-token-ids"):
        setting = source.effective("rollout-stop-token-ids")
        draft.choices.append(f"{setting.shown}: rollout.stop has texts; write the tokens as the tokenizer shows them")


def _translate_validation(run: SlimeRun) -> None:
    """Translate sampling for validation, whose defaults are the values for training."""
    source, draft = run.source, run.draft
    for name, ours in (("temperature", "temperature"), ("top-p", "top_p"), ("top-k", "top_k")):
        keys = (f"eval-{name}",) if source.effective(f"eval-{name}").value is not None else (f"rollout-{name}",)
        note = "" if keys[0].startswith("eval") else "as in training"
        value = source.number(*keys) if name != "top-k" else source.integer(*keys)
        if value != {"top-p": 1, "top-k": -1}.get(name):
            draft.take(source, f"rollout.validation_{ours}", value, *keys, note=note)
    samples = source.integer("n-samples-per-eval-prompt")
    if samples > 1:
        draft.take(source, "rollout.validation_samples", samples, "n-samples-per-eval-prompt")


def _translate_dynamic_sampling(run: SlimeRun) -> None:
    source, draft, ours = run.source, run.draft, "algorithm.dynamic_sampling"
    path = source.text("dynamic-sampling-filter-path")
    over = source.integer("over-sampling-batch-size")
    if path is None:
        return
    if not path.rpartition(".")[2].startswith(NONZERO_STD):
        setting = source.effective("dynamic-sampling-filter-path")
        draft.block(setting, f"groups are dropped if their rewards are equal ({NONZERO_STD}), or by algorithm.filter")
        return
    draft.take(source, f"{ours}.enable", True, "dynamic-sampling-filter-path")
    draft.set(f"{ours}.metric", "reward", source.effective("dynamic-sampling-filter-path").origin)
    draft.set(f"{ours}.max_batches", UNLIMITED_BATCHES, "slime has no limit")
    if over > run.prompts_per_step:
        draft.changes.append(
            f"--over-sampling-batch-size={over} prompts are sampled at a time in slime, and the rest of a round is "
            f"aborted; here a round samples trainer.prompts_per_step={run.prompts_per_step}"
        )
