"""slime's loss and advantage arguments."""

from __future__ import annotations

from mcore_rl.migration.slime.run import SlimeRun

ESTIMATORS = {
    "grpo": ("grpo", "ppo_clip"),
    "gspo": ("grpo", "gspo"),
    "cispo": ("grpo", "cispo"),
    "ppo": ("gae", "ppo_clip"),
    "reinforce_plus_plus": ("reinforce_plus_plus", "ppo_clip"),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", "ppo_clip"),
}
"""--advantage-estimator -> our advantage and policy loss."""
KL_KINDS = {"k1": "k1", "k2": "mse", "k3": "low_var", "low_var_kl": "low_var"}
LOSS = "algorithm.policy_loss"


def translate_algorithm(run: SlimeRun) -> None:
    """Translate advantages, loss, its denominator, KL terms and the correction."""
    source, draft = run.source, run.draft
    if run.is_supervised:
        draft.set(f"{LOSS}.name", "sft", source.effective("loss-type").origin)
        draft.choices.append(
            "--loss-type=sft_loss trains all assistant messages of a conversation; here data.prompt_key is the "
            "conversation up to the answer, and data.answer_key the answer"
        )
        source.find("advantage-estimator", "calculate-per-token-loss", "disable-compute-advantages-and-returns")
        return
    if source.text("loss-type") != "policy_loss":
        draft.block(source.effective("loss-type"), "write algorithm.policy_loss.name=module_or_file.py:function")
    name = source.text("advantage-estimator") or "grpo"
    if name not in ESTIMATORS:
        draft.block(source.effective("advantage-estimator"), f"the estimators are {', '.join(ESTIMATORS)}")
        name = "grpo"
    advantage, loss = ESTIMATORS[name]
    draft.take(source, "algorithm.advantage", advantage, "advantage-estimator")
    draft.take(source, f"{LOSS}.name", loss, "advantage-estimator")
    _translate_options(run, advantage, loss)
    _translate_denominator(run)
    _translate_kl(run)
    if source.flag("use-tis"):
        draft.take(source, "algorithm.correction.kind", "truncate", "use-tis")
        draft.take(source, "algorithm.correction.high", source.number("tis-clip"), "tis-clip")
        if source.number("tis-clip-low") > 0:
            draft.take(source, "algorithm.correction.low", source.number("tis-clip-low"), "tis-clip-low")
    source.find("tis-clip", "tis-clip-low")
    if source.flag("use-rollout-logprobs"):
        draft.changes.append(
            "--use-rollout-logprobs uses the engine's log-probabilities as the old policy; here the trainer recomputes "
            "them, and algorithm.correction weighs the difference"
        )
    if source.flag("use-rollout-routing-replay"):
        draft.take(source, "actor.moe.router_replay", "engine", "use-rollout-routing-replay")
    elif source.flag("use-routing-replay"):
        draft.take(source, "actor.moe.router_replay", "policy", "use-routing-replay")


def _translate_options(run: SlimeRun, advantage: str, loss: str) -> None:
    source, draft = run.source, run.draft
    if advantage == "grpo" and source.flag("disable-grpo-std-normalization"):
        draft.take(source, "algorithm.normalize_by_std", False, "disable-grpo-std-normalization")
    if advantage == "gae":
        for ours, theirs in (("gamma", "gamma"), ("lam", "lambd")):
            if source.number(theirs) != 1:
                draft.take(source, f"algorithm.{ours}", source.number(theirs), theirs)
        whitened = source.flag("normalize-advantages")
        if not whitened:
            draft.take(source, "algorithm.whiten", False, "normalize-advantages")
        draft.take(source, "critic.clip_range", source.number("value-clip"), "value-clip")
        warmup = source.integer("num-critic-only-steps")
        draft.take(source, "trainer.critic_warmup_steps", warmup, "num-critic-only-steps")
    elif source.flag("normalize-advantages") and advantage == "grpo":
        draft.block(source.effective("normalize-advantages"), "advantages of grpo are not whitened over the batch")
    draft.take(source, f"{LOSS}.clip_low", source.number("eps-clip"), "eps-clip")
    high = "eps-clip-high" if source.effective("eps-clip-high").value is not None else "eps-clip"
    draft.take(source, f"{LOSS}.clip_high", source.number(high), high)
    if source.number("eps-clip-c") > 0 and loss == "ppo_clip":
        draft.take(source, f"{LOSS}.dual_clip", source.number("eps-clip-c"), "eps-clip-c")
    draft.take(source, "algorithm.entropy_coefficient", source.number("entropy-coef"), "entropy-coef")
    source.find("gamma", "lambd", "value-clip", "num-critic-only-steps", "normalize-advantages", "eps-clip-c")


def _translate_denominator(run: SlimeRun) -> None:
    """slime averages each response, then the responses; with --calculate-per-token-loss all tokens of an update."""
    source, draft = run.source, run.draft
    per_token = source.flag("calculate-per-token-loss")
    mode = "token-mean" if per_token else "seq-mean-token-mean"
    draft.set(
        "algorithm.loss_aggregation",
        mode,
        source.effective("calculate-per-token-loss").origin
        + ("" if per_token else " is not set: the mean of each response, then of the responses"),
    )
    if not per_token:
        draft.changes.append(
            "the mean over responses divides by --global-batch-size in slime; here by the number of responses with "
            "a trained token"
        )


def _translate_kl(run: SlimeRun) -> None:
    source, draft = run.source, run.draft
    kind = KL_KINDS.get(source.text("kl-loss-type") or "")
    in_loss = source.number("kl-loss-coef") if source.flag("use-kl-loss") else 0
    in_reward = source.number("kl-coef")
    ignored = draft.values.get("algorithm.advantage", "grpo") == "grpo"
    if kind is None and (in_loss or in_reward):
        draft.block(source.effective("kl-loss-type"), f"estimators of the KL are {', '.join(KL_KINDS)}")
    if in_loss > 0:
        draft.take(source, "algorithm.kl.in_loss", in_loss, "kl-loss-coef")
        draft.take(source, "algorithm.kl.loss_kind", kind, "kl-loss-type")
    if in_reward > 0 and ignored:
        draft.changes.append(
            f"{source.effective('kl-coef').shown} is left out: slime's grpo, gspo and cispo ignore it; "
            "algorithm.kl.in_reward subtracts it from the rewards"
        )
    elif in_reward > 0:
        draft.take(source, "algorithm.kl.in_reward", in_reward, "kl-coef")
        draft.take(source, "algorithm.kl.reward_kind", kind, "kl-loss-type")
    source.find("use-kl-loss", "kl-loss-coef", "kl-coef", "kl-loss-type")
    if source.flag("use-unbiased-kl") and in_loss > 0:
        draft.take(source, "algorithm.kl.unbiased", True, "use-unbiased-kl")
        if kind == "mse":
            draft.block(source.effective("use-unbiased-kl"), "k2 is biased with and without weights; use k1 or k3")
    interval = source.integer("ref-update-interval")
    if interval > 0 and any(key.startswith("algorithm.kl.in_") for key in draft.values):
        draft.take(source, "reference.refresh_every_steps", interval, "ref-update-interval")
