"""verl's section `actor_rollout_ref.rollout`: engines, sampling, tools."""

from __future__ import annotations

from mcore_rl.config.schema import TOOL_FORMATS
from mcore_rl.migration.draft import Row
from mcore_rl.migration.verl.defaults import ROLLOUT
from mcore_rl.migration.verl.run import EXPERTS, VerlRun

UNLIMITED_TURNS = 100
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


def _translate_engine(run: VerlRun) -> None:
    source, draft = run.source, run.draft
    name = source.text(f"{ROLLOUT}.name")
    if name == "sglang":
        draft.take(source, "rollout.engine", name, f"{ROLLOUT}.name")
    elif name not in (None, "vllm"):
        draft.changes.append(f"{ROLLOUT}.name={name}: rollout.engine is vllm here")
    quantization = source.text(f"{ROLLOUT}.quantization")
    if quantization is not None:
        draft.changes.append(f"{ROLLOUT}.quantization={quantization}: engines compute in model.dtype here")
    if run.engine_gpus > 1 and run.spreads_experts:
        draft.take(source, "rollout.expert_parallel", True, *EXPERTS)
    for key in ("data_parallel_size", "pipeline_model_parallel_size"):
        if source.integer(f"{ROLLOUT}.{key}") > 1:
            draft.changes.append(
                f"{source.effective(f'{ROLLOUT}.{key}').shown}: an engine has tensor-parallel ranks only; "
                f"rollout.tp={run.engine_gpus} is the number of GPUs of verl's engine"
            )


def _translate_sampling(run: VerlRun) -> None:
    source, draft = run.source, run.draft
    top_p, top_k = source.number(f"{ROLLOUT}.top_p"), source.integer(f"{ROLLOUT}.top_k")
    if top_p < 1:
        draft.block(source.effective(f"{ROLLOUT}.top_p"), "training samples from the full softmax; set it to 1")
    # verl's Hugging Face rollout writes 0 for all tokens.
    if top_k > 0:
        draft.block(source.effective(f"{ROLLOUT}.top_k"), "training samples from the full softmax; set it to -1")
    # Scripts add these keys, which verl passes on to the engine.
    for name, neutral in (("min_p", 0), ("repetition_penalty", 1)):
        setting = source.find(f"{ROLLOUT}.{name}")
        if setting is not None and setting.value not in (None, neutral):
            remedy = f"set it to {neutral}; validation may use rollout.validation_{name}"
            draft.block(setting, f"training samples from the unchanged softmax; {remedy}")


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
