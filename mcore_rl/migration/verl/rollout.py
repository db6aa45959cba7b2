"""verl's section `actor_rollout_ref.rollout`: engines, sampling, tools."""

from __future__ import annotations

from mcore_rl.config.quantization import FP8, UNQUANTIZED
from mcore_rl.config.sampling import MTP, NGRAM
from mcore_rl.config.schema import TOOL_FORMATS
from mcore_rl.migration.draft import Row
from mcore_rl.migration.verl.defaults import ROLLOUT
from mcore_rl.migration.verl.run import EXPERTS, VerlRun

UNLIMITED_TURNS = 100
MTP_KEYS = "actor_rollout_ref.model.mtp"
DP_ATTENTION = f"{ROLLOUT}.engine_kwargs.sglang.enable_dp_attention"
SHARES = {"left": "end", "right": "start", "middle": "both"}
"""verl names the side that it cuts off, we name the part that stays."""
BUCKETS = tuple(f"{ROLLOUT}.{section}update_weights_bucket_megabytes" for section in ("checkpoint_engine.", ""))
ROWS = (
    Row("rollout.samples_per_prompt", (f"{ROLLOUT}.n",)),
    Row("rollout.temperature", (f"{ROLLOUT}.temperature",)),
    Row("rollout.gpu_memory_fraction", (f"{ROLLOUT}.gpu_memory_utilization",)),
    Row("rollout.enforce_eager", (f"{ROLLOUT}.enforce_eager",)),
    Row("rollout.max_concurrent_requests", (f"{ROLLOUT}.max_num_seqs",)),
    Row("rollout.max_batched_tokens", (f"{ROLLOUT}.max_num_batched_tokens",)),
    Row("rollout.validation_top_p", (f"{ROLLOUT}.val_kwargs.top_p",)),
    Row("rollout.validation_min_p", (f"{ROLLOUT}.val_kwargs.min_p",)),
    Row("rollout.validation_repetition_penalty", (f"{ROLLOUT}.val_kwargs.repetition_penalty",)),
    Row("weights.bucket_mib", BUCKETS),
)
TOOL_ROWS = (
    Row("rollout.max_tool_calls_per_turn", (f"{ROLLOUT}.multi_turn.max_parallel_calls",)),
    Row("rollout.tool_answer_characters", (f"{ROLLOUT}.multi_turn.max_tool_response_length",)),
    Row(
        "rollout.tool_answer_keep",
        (f"{ROLLOUT}.multi_turn.tool_response_truncate_side",),
        lambda value: SHARES.get(str(value)),
    ),
)


def translate_rollout(run: VerlRun) -> None:
    """Translate engines, sampling and tools."""
    run.draft.apply(run.source, ROWS)
    _translate_engine(run)
    _translate_sampling(run)
    _translate_validation(run)
    _translate_tools(run)


def translate_drafts(run: VerlRun) -> None:
    """Translate speculative decoding. Call after translate_ranks, which translates the loss of the drafting layers."""
    source, draft, enabled = run.source, run.draft, f"{MTP_KEYS}.enable_rollout"
    method, num_tokens = source.text(f"{MTP_KEYS}.method"), source.integer(f"{MTP_KEYS}.num_speculative_tokens")
    if not (source.flag(f"{MTP_KEYS}.enable") and source.flag(enabled)):
        return
    reason = ""
    if draft.values.get("rollout.engine") == "sglang":
        reason = "rollout.draft needs rollout.engine=vllm"
    elif method not in (MTP, NGRAM):
        reason = f"rollout.draft has no method {method}"
    elif method == MTP and not draft.values.get("actor.mtp_loss_coefficient"):
        reason = "rollout.draft=mtp needs layers with a loss (actor.mtp_loss_coefficient)"
    elif method == MTP and draft.values.get("rollout.quantization") == FP8:
        reason = f"rollout.draft=mtp does not support rollout.quantization={FP8}"
    if reason:
        draft.changes.append(f"{source.effective(enabled).shown}: engines decode without drafts; {reason}")
        return
    draft.take(source, "rollout.draft", method, enabled)
    draft.take(source, "rollout.draft_tokens", num_tokens, f"{MTP_KEYS}.num_speculative_tokens")


def _translate_engine(run: VerlRun) -> None:
    source, draft = run.source, run.draft
    name = source.text(f"{ROLLOUT}.name")
    if name == "sglang":
        draft.take(source, "rollout.engine", name, f"{ROLLOUT}.name")
    elif name not in (None, "vllm"):
        draft.changes.append(f"{ROLLOUT}.name={name}: rollout.engine is vllm here")
    quantization = source.text(f"{ROLLOUT}.quantization")
    if quantization == FP8 and name != "sglang":
        # verl rounds blocks of 128 x 128 too, in the engine.
        draft.take(source, "rollout.quantization", FP8, f"{ROLLOUT}.quantization")
        draft.changes.append(
            f"{ROLLOUT}.quantization={FP8}: algorithm.correction.kind=auto truncates importance weights then; verl "
            "corrects nothing unless it is configured"
        )
    elif quantization is not None:
        draft.changes.append(
            f"{ROLLOUT}.quantization={quantization}: engines compute in model.dtype here; rollout.quantization is "
            f"{FP8} with vLLM, or {UNQUANTIZED}"
        )
    if run.engine_gpus > 1 and run.spreads_experts:
        draft.take(source, "rollout.expert_parallel", True, *EXPERTS)
    if name == "sglang" and run.engine_gpus > 1 and source.flag(DP_ATTENTION):
        draft.take(source, "rollout.data_parallel_attention", True, DP_ATTENTION)
        draft.take(source, "rollout.expert_parallel", True, *EXPERTS, DP_ATTENTION)
    for key in ("data_parallel_size", "pipeline_model_parallel_size"):
        if source.integer(f"{ROLLOUT}.{key}") > 1:
            draft.changes.append(
                f"{source.effective(f'{ROLLOUT}.{key}').shown}: an engine has tensor-parallel ranks only; "
                f"rollout.tp={run.engine_gpus} is the number of GPUs of verl's engine"
            )


def _translate_sampling(run: VerlRun) -> None:
    source, draft = run.source, run.draft
    _translate_truncation(run)
    # Scripts add this key, which verl passes on to the engine.
    setting = source.find(f"{ROLLOUT}.repetition_penalty")
    if setting is not None and setting.value not in (None, 1):
        remedy = "set it to 1; validation may use rollout.validation_repetition_penalty"
        draft.block(setting, f"training samples from the unchanged softmax; {remedy}")


def _translate_truncation(run: VerlRun) -> None:
    """Translate sampling from a part of the vocabulary, whose sets the trainer then uses."""
    source, draft = run.source, run.draft
    top_p, top_k = source.number(f"{ROLLOUT}.top_p"), source.integer(f"{ROLLOUT}.top_k")
    # Scripts add min_p, which verl passes on to the engine. Its Hugging Face rollout writes top_k 0 for all tokens.
    min_p = source.number(f"{ROLLOUT}.min_p") if source.find(f"{ROLLOUT}.min_p") is not None else 0
    found = {"top_p": (top_p, top_p < 1), "top_k": (top_k, top_k > 0), "min_p": (min_p, min_p > 0)}
    used = {name: value for name, (value, truncates) in found.items() if truncates}
    for name, value in used.items():
        draft.take(source, f"rollout.{name}", value, f"{ROLLOUT}.{name}")
    if used:
        shown = source.effective(f"{ROLLOUT}.{next(iter(used))}").shown
        draft.set("rollout.keep_sampling_mask", True, "for exact log-probabilities")
        draft.changes.append(
            f"{shown}: verl normalizes log-probabilities over the whole vocabulary; here the trainer normalizes over "
            "the tokens that the engine sampled from (rollout.keep_sampling_mask)"
        )


def _translate_validation(run: VerlRun) -> None:
    source, draft, keys = run.source, run.draft, f"{ROLLOUT}.val_kwargs"
    sampled = not source.is_set(f"{keys}.do_sample") or source.flag(f"{keys}.do_sample")
    temperature = source.number(f"{keys}.temperature") if sampled else 0.0
    names = (f"{keys}.temperature",) if sampled else (f"{keys}.do_sample",)
    draft.take(source, "rollout.validation_temperature", temperature, *names)
    source.find(f"{keys}.temperature")
    top_k, samples = source.integer(f"{keys}.top_k"), source.integer(f"{keys}.n")
    draft.take(source, "rollout.validation_top_k", top_k if top_k > 0 else -1, f"{keys}.top_k")
    if samples > 1 and temperature == 0:
        draft.changes.append(
            f"{source.effective(f'{keys}.n').shown}: greedy responses to a prompt are all equal, so one is generated"
        )
    elif samples > 1 or source.is_set(f"{keys}.n"):
        draft.take(source, "rollout.validation_samples", max(samples, 1), f"{keys}.n")


def _translate_tools(run: VerlRun) -> None:
    source, draft, keys = run.source, run.draft, f"{ROLLOUT}.multi_turn"
    files = (f"{keys}.tool_config_path", f"{keys}.function_tool_path", "data.tool_config_path")
    path = source.text(*files)
    loop = source.find(f"{ROLLOUT}.agent.default_agent_loop", f"{ROLLOUT}.agent.agent_loop_config_path")
    for setting in (loop, source.find(f"{keys}.interaction_config_path")):
        if setting is not None and setting.value not in (None, "single_turn_agent", "tool_agent"):
            draft.choices.append(
                f"{setting.shown}: write this episode for rollout.episode or rollout.environment (docs/episodes.md)"
            )
    enabled = source.flag(f"{keys}.enable") or (loop is not None and loop.value == "tool_agent")
    if path is None or not (enabled or not source.is_set(f"{keys}.enable")):
        return
    draft.take(source, "rollout.tools", path, *files)
    draft.apply(source, TOOL_ROWS)
    limits = (f"{keys}.max_assistant_turns", f"{keys}.max_turns")
    turns = source.integer(*limits)
    note = "" if turns else "verl has no limit"
    draft.take(source, "rollout.max_turns", turns or UNLIMITED_TURNS, *limits, note=note)
    parser = source.text(f"{keys}.format")
    if parser in TOOL_FORMATS:
        draft.take(source, "rollout.tool_parser", parser, f"{keys}.format")
    else:
        draft.choices.append(
            f"{keys}.format={parser}: rollout.tool_parser is one of {', '.join(TOOL_FORMATS)}, or yours"
        )
    source.find(f"{keys}.max_user_turns")
