"""slime's batch sizes, steps and learning rate schedule."""

from __future__ import annotations

from mcore_rl.migration.slime.run import SlimeRun

SCHEDULES = ("constant", "linear", "cosine")
OPTIMIZER = "actor.optimizer"


def translate_batches(run: SlimeRun) -> None:
    """Translate batches, which slime counts in prompts (rollout) and responses (updates), and the steps."""
    source, draft = run.source, run.draft
    draft.take(source, "trainer.prompts_per_step", run.prompts_per_step, "rollout-batch-size")
    responses, samples = run.responses_per_update, run.samples
    keys = ("num-steps-per-rollout",) if source.integer("num-steps-per-rollout") > 0 else ("global-batch-size",)
    prompts = max(responses // samples, 1)
    note = f"{responses} responses / {samples} per prompt"
    if source.is_set(*keys):
        draft.take(source, "trainer.prompts_per_update", prompts, *keys, note=note)
    else:
        draft.set("trainer.prompts_per_update", prompts, "one update per rollout")
    source.find("global-batch-size", "num-steps-per-rollout")
    if responses % samples:
        draft.choices.append(
            f"trainer.prompts_per_update={prompts}: {note} is no whole number, and an update has whole groups here"
        )
    draft.changes.append(
        f"an update counts responses in slime ({_update_size(run)}); trainer.prompts_per_update={prompts} "
        f"counts prompts with {samples} responses each"
    )
    _translate_steps(run)
    _translate_budget(run)


def _update_size(run: SlimeRun) -> str:
    """Describe the argument that determines the responses of an update."""
    responses, steps = run.responses_per_update, run.source.effective("num-steps-per-rollout")
    return f"--global-batch-size={responses}" if not steps.value else f"{steps.shown}: {responses} responses"


def _translate_steps(run: SlimeRun) -> None:
    source, draft = run.source, run.draft
    steps, epochs = source.integer("num-rollout"), source.integer("num-epoch")
    if steps > 0:
        draft.take(source, "trainer.steps", steps, "num-rollout")
    elif run.rows is not None and epochs > 0:
        value = max(epochs * run.rows // run.prompts_per_step, 1)
        draft.take(source, "trainer.steps", value, "num-epoch", note=f"x {run.rows} prompts / {run.prompts_per_step}")
    else:
        draft.choices.append(
            f"trainer.steps: --num-epoch={epochs} is {epochs} x (number of prompts / {run.prompts_per_step}) steps; "
            "set it, or add --rows NUMBER_OF_PROMPTS"
        )
    source.find("num-rollout", "num-epoch")


def _translate_budget(run: SlimeRun) -> None:
    """Translate --max-tokens-per-gpu, or the number of responses of a micro-batch, to a token budget."""
    source, draft = run.source, run.draft
    cp = max(source.integer("context-parallel-size"), 1)
    if run.is_supervised:
        _translate_lengths(run, source.integer("max-tokens-per-gpu") * cp)
    if source.flag("use-dynamic-batch-size"):
        key, budget = "max-tokens-per-gpu", source.integer("max-tokens-per-gpu") * cp
        note = f"x {cp} context-parallel ranks" if cp > 1 else ""
    else:
        key = "micro-batch-size"
        budget, note = source.integer(key) * run.longest, f"x {run.longest} tokens of the longest sequence"
    if budget < run.longest:
        note, budget = f"raised from {budget} to one longest sequence", run.longest
    step = 2 * cp if cp > 1 else 1
    budget = -(-budget // step) * step
    draft.take(source, "actor.tokens_per_microbatch", budget, key, note=note)
    draft.changes.append(
        f"{source.effective(key).shown} per GPU: actor.tokens_per_microbatch={budget} is the maximum number of tokens "
        "of a packed row, which the context-parallel ranks share. slime gives a longer sequence a micro-batch of its "
        "own; here the budget holds the longest sequence"
    )
    source.find("max-tokens-per-gpu", "micro-batch-size", "log-probs-max-tokens-per-gpu")


def _translate_lengths(run: SlimeRun, budget: int) -> None:
    """Set the limits of prompt and answer, which slime's supervised training does not have."""
    for name in ("prompt", "response"):
        if budget > 1:
            run.draft.set(f"rollout.max_{name}_tokens", budget // 2, "half of --max-tokens-per-gpu; slime has no limit")
    run.draft.choices.append("rollout.max_prompt_tokens, rollout.max_response_tokens: slime has no limits for them")


def translate_schedule(run: SlimeRun) -> None:
    """Translate warm-up and decay of the learning rate, which Megatron counts in optimizer updates."""
    source, draft = run.source, run.draft
    style = source.text("lr-decay-style")
    if style not in SCHEDULES:
        draft.block(source.effective("lr-decay-style"), f"the schedules are {', '.join(SCHEDULES)}")
    elif style != "constant":
        draft.take(source, f"{OPTIMIZER}.schedule", style, "lr-decay-style")
        draft.take(source, f"{OPTIMIZER}.min_lr", source.number("min-lr"), "min-lr")
        if source.integer("lr-decay-iters") > 0:
            draft.take(source, f"{OPTIMIZER}.decay_steps", source.integer("lr-decay-iters"), "lr-decay-iters")
    fraction, steps = source.number("lr-warmup-fraction"), source.integer("lr-warmup-iters")
    if fraction > 0 and "trainer.steps" in draft.values:
        updates = draft.integer("trainer.steps") * max(
            draft.integer("trainer.prompts_per_step") // draft.integer("trainer.prompts_per_update"), 1
        )
        note = f"of {updates} updates"
        draft.take(source, f"{OPTIMIZER}.warmup_steps", int(fraction * updates), "lr-warmup-fraction", note=note)
    elif fraction > 0:
        setting = source.effective("lr-warmup-fraction")
        draft.choices.append(f"{OPTIMIZER}.warmup_steps: {setting.shown} of all updates; set it with trainer.steps")
    elif steps > 0:
        draft.take(source, f"{OPTIMIZER}.warmup_steps", steps, "lr-warmup-iters")
    source.find("lr-decay-iters", "min-lr", "lr-warmup-iters", "lr-warmup-init")
