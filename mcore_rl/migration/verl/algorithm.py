"""verl's section `algorithm` and the loss keys of `actor_rollout_ref.actor`."""

from __future__ import annotations

from collections.abc import Callable

from mcore_rl.config.reward import TAKEN
from mcore_rl.migration.draft import SKIP, Row
from mcore_rl.migration.source import Setting
from mcore_rl.migration.verl.correction import bypasses, translate_correction
from mcore_rl.migration.verl.defaults import ACTOR, CRITIC
from mcore_rl.migration.verl.run import VerlRun

TOKEN_BASELINE = "optimal_token_baseline"
ESTIMATORS = {
    **{name: name for name in "gae grpo grpo_passk rloo remax opo gpg gdpo".split()},
    **{name: name for name in "reinforce_plus_plus reinforce_plus_plus_baseline".split()},
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "optimal_token_baseline": TOKEN_BASELINE,
    "tir_optimal_token_baseline": TOKEN_BASELINE,
}
LOSSES = {
    "vanilla": "ppo_clip",
    "gspo": "gspo",
    "geo_mean": "gmpo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "cispo": "cispo",
    "sapo": "sapo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "gpg": "reinforce",
}
DIVERGENCES = ("dppo_tv", "dppo_kl")
CLIPPING = ("ppo_clip", "gspo", "gmpo", "cispo", "clip_cov", *DIVERGENCES)
"""Losses with the options clip_low and clip_high."""
COVARIANCE = {
    "clip_cov": {"cov_ratio": "clip_cov_ratio", "cov_low": "clip_cov_lb", "cov_high": "clip_cov_ub"},
    "kl_cov": {"cov_ratio": "kl_cov_ratio", "kl_coef": "ppo_kl_coef"},
}
"""Loss -> our options -> verl's."""
KL_KINDS = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "mse",
    "k2": "mse",
    "low_var_kl": "low_var",
    "low_var": "low_var",
    "k3": "low_var",
}
METRICS = {"acc": "accuracy", "score": "reward", "seq_reward": "reward", "seq_final_reward": "reward"}
REPLAY_KEYS = tuple(f"{section}.router_replay.mode" for section in (ACTOR, f"{ACTOR}.megatron", f"{ACTOR}.veomni"))
REPLAY = {"disabled": SKIP, "R2": "policy", "R3": "engine"}
UNLIMITED_BATCHES = 1000
"""Value of algorithm.dynamic_sampling.max_batches for a run of verl without a limit."""
LOSS, FILTER = "algorithm.policy_loss", "algorithm.filter_groups"

ADVANTAGE_ROWS = (Row("algorithm.advantage", ("algorithm.adv_estimator",), lambda name: ESTIMATORS.get(str(name))),)
LOSS_ROWS = (
    Row(f"{LOSS}.name", (f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_mode"), lambda name: LOSSES.get(str(name))),
    Row("algorithm.loss_aggregation", (f"{ACTOR}.loss_agg_mode",)),
    Row("algorithm.entropy_coefficient", (f"{ACTOR}.entropy_coeff",)),
    Row("actor.moe.router_replay", REPLAY_KEYS, lambda mode: REPLAY.get(str(mode))),
)


def translate_algorithm(run: VerlRun) -> None:
    """Translate advantages, loss, KL terms, corrections and dynamic sampling."""
    run.draft.apply(run.source, (*ADVANTAGE_ROWS, *LOSS_ROWS))
    _translate_advantage_options(run)
    _translate_loss_options(run)
    _translate_kl(run)
    translate_correction(run)
    _translate_dynamic_sampling(run)
    _list_denominator(run)


def _translate_advantage_options(run: VerlRun) -> None:
    source, draft = run.source, run.draft
    name = draft.values.get("algorithm.advantage", "grpo")
    if name in ("gae", "reinforce_plus_plus"):
        draft.apply(source, (Row("algorithm.gamma", ("algorithm.gamma",), _unless(1)),))
    if name == "gae":
        draft.apply(source, (Row("algorithm.lam", ("algorithm.lam",), _unless(1)),))
    source.find("algorithm.gamma", "algorithm.lam")
    if name in ("grpo", "grpo_passk"):
        rows = Row("algorithm.normalize_by_std", ("algorithm.norm_adv_by_std_in_grpo",), _unless(True))
        draft.apply(source, (rows,))
    if name == "gdpo":
        _translate_reward_parts(run)
    if name == TOKEN_BASELINE:
        draft.changes.append(
            f"algorithm.adv_estimator={source.text('algorithm.adv_estimator')} has baseline 0 in verl where only one "
            "response of a group is left; here the advantage is 0 there. Positions count trained tokens"
        )
    # verl's ranks compute this only on request.
    source.find(f"{ACTOR}.calculate_sum_pi_squared", f"{ACTOR}.sum_pi_squared_checkpointing")
    source.find("algorithm.norm_adv_by_std_in_grpo", "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights")
    if source.flag("algorithm.use_pf_ppo"):
        draft.block(source.effective("algorithm.use_pf_ppo"), "PF-PPO, which resamples responses, does not exist here")


def _translate_reward_parts(run: VerlRun) -> None:
    """Translate the parts of gdpo's rewards. verl lists names and weights; here the weights have names."""
    source, draft = run.source, run.draft
    keys = source.effective("algorithm.gdpo_reward_keys")
    names = keys.value if isinstance(keys.value, list) else []
    weights = source.effective("algorithm.gdpo_reward_weights").value or [1.0] * len(names)
    unread = [str(name) for name in names if name in ("score", "acc")]
    if not names or not isinstance(weights, list) or len(weights) != len(names) or unread:
        reason = f"{', '.join(unread)} is no part of a score here; return it under another name"
        draft.block(keys, reason if unread else "gdpo needs names of reward parts, and a weight for each or for none")
        return
    # Names of metrics and record fields get this suffix.
    parts = {f"{name}_part" if name in TAKEN else str(name): float(w) for name, w in zip(names, weights, strict=True)}
    draft.take(source, "algorithm.part_weights", parts, "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights")
    draft.changes.append(
        "algorithm.adv_estimator=gdpo divides by the standard deviation over all tokens of a batch in verl, after "
        "subtracting their mean; here by the standard deviation over its responses, as in the paper"
    )
    if not source.flag("algorithm.norm_adv_by_std_in_grpo"):
        draft.block(source.effective("algorithm.norm_adv_by_std_in_grpo"), "gdpo always divides by the group's std")


def _translate_loss_options(run: VerlRun) -> None:
    source, draft = run.source, run.draft
    loss = draft.values.get(f"{LOSS}.name", "ppo_clip")
    if loss in CLIPPING:
        for ours, theirs in (("clip_low", "clip_ratio_low"), ("clip_high", "clip_ratio_high")):
            # verl reads clip_ratio only if these are null.
            explicit = source.effective(f"{ACTOR}.{theirs}").value is not None
            key = f"{ACTOR}.{theirs}" if explicit else f"{ACTOR}.clip_ratio"
            draft.take(source, f"{LOSS}.{ours}", source.number(key), key)
    clip_ratio = source.find(f"{ACTOR}.clip_ratio")
    if clip_ratio is not None and clip_ratio.value != 0.2 and not source.is_set(f"{ACTOR}.clip_ratio_low"):
        draft.changes.append(
            f"{clip_ratio.shown} has no effect in verl, which uses clip_ratio_low and "
            f"clip_ratio_high (0.2); set {LOSS}.clip_low and {LOSS}.clip_high to clip at this value"
        )
    if loss == "ppo_clip":
        draft.apply(source, (Row(f"{LOSS}.dual_clip", (f"{ACTOR}.clip_ratio_c",)),))
    if loss == "sapo":
        draft.apply(source, (Row(f"{LOSS}.{name}", (f"{ACTOR}.{name}",)) for name in ("tau_pos", "tau_neg")))
        # verl ignores loss_agg_mode for this loss.
        draft.set("algorithm.loss_aggregation", "seq-mean-token-mean", f"{ACTOR}.policy_loss.loss_mode=sapo")
    source.find(f"{ACTOR}.tau_pos", f"{ACTOR}.tau_neg")
    if loss in DIVERGENCES:
        draft.apply(source, (Row(f"{LOSS}.ratio_cap", (f"{ACTOR}.clip_ratio_c",)),))
        if not bypasses(run):
            draft.set(f"{LOSS}.anchor", "old", "verl without algorithm.rollout_correction.bypass_mode")
    for ours, theirs in COVARIANCE.get(str(loss), {}).items():
        # Versions before 0.5 had no section policy_loss.
        keys = (f"{ACTOR}.policy_loss.{theirs}", f"{ACTOR}.{theirs}")
        draft.take(source, f"{LOSS}.{ours}", source.number(*keys), *keys)
    source.find(f"{ACTOR}.clip_ratio_c")


def _translate_kl(run: VerlRun) -> None:
    """Translate both KL terms. verl has a flag and a coefficient; we have a coefficient that is 0 without the term."""
    source, draft = run.source, run.draft
    if source.flag(f"{ACTOR}.use_kl_loss") and source.number(f"{ACTOR}.kl_loss_coef") > 0:
        draft.take(source, "algorithm.kl.in_loss", source.number(f"{ACTOR}.kl_loss_coef"), f"{ACTOR}.kl_loss_coef")
        kind = _kind(run, source.effective(f"{ACTOR}.kl_loss_type"))
        draft.take(source, "algorithm.kl.loss_kind", kind, f"{ACTOR}.kl_loss_type")
    control = "algorithm.kl_ctrl"
    if source.flag("algorithm.use_kl_in_reward") and source.number(f"{control}.kl_coef") > 0:
        draft.take(source, "algorithm.kl.in_reward", source.number(f"{control}.kl_coef"), f"{control}.kl_coef")
        kind = _kind(run, source.effective("algorithm.kl_penalty"))
        draft.take(source, "algorithm.kl.reward_kind", kind, "algorithm.kl_penalty")
        if source.text(f"{control}.type") == "adaptive":
            draft.set("algorithm.kl.controller", "adaptive", source.effective(f"{control}.type").origin)
            draft.take(source, "algorithm.kl.target", source.number(f"{control}.target_kl"), f"{control}.target_kl")
            draft.take(source, "algorithm.kl.horizon", source.integer(f"{control}.horizon"), f"{control}.horizon")
    coefficient = source.find(f"{control}.kl_coef")
    old = not source.is_set("algorithm.use_kl_in_reward") and not source.flag(f"{ACTOR}.use_kl_loss")
    given = coefficient is not None and coefficient.line is not None
    if coefficient is not None and given and old and source.number(f"{control}.kl_coef") > 0:
        draft.changes.append(
            f"{coefficient.shown} has no effect without algorithm.use_kl_in_reward=True. Before verl 0.3 it had, "
            "unless use_kl_loss was set: for a script of that time, set algorithm.kl.in_reward"
        )
    source.find(f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type", "algorithm.kl_penalty")
    source.find(*(f"{control}.{name}" for name in ("type", "kl_coef", "target_kl", "horizon")))
    has_reference = any(key.startswith("algorithm.kl.in_") for key in draft.values)
    offloaded = ("actor_rollout_ref.ref.megatron.param_offload", "actor_rollout_ref.ref.fsdp_config.param_offload")
    found = source.find(*offloaded)
    if has_reference and found is not None:
        draft.set("reference.offload", source.flag(*offloaded), found.origin)


def _kind(run: VerlRun, setting: Setting) -> str:
    """Translate an estimator of the KL. A trailing + means an estimator whose gradient is k2's."""
    name = str(setting.value)
    if name.endswith("+") or name not in KL_KINDS:
        run.draft.block(setting, f"estimators of the KL are {', '.join(KL_KINDS)}")
        return "low_var"
    return KL_KINDS[name]


def _translate_dynamic_sampling(run: VerlRun) -> None:
    source, draft, ours = run.source, run.draft, "algorithm.dynamic_sampling"
    enabled = source.flag(f"{FILTER}.enable")
    generated, trained = source.integer("data.gen_batch_size"), max(run.prompts_per_step, 1)
    limit = source.integer(f"{FILTER}.max_num_gen_batches")
    metric = source.find(f"{FILTER}.metric")
    if not enabled:
        return
    draft.take(source, f"{ours}.enable", True, f"{FILTER}.enable")
    if metric is not None:
        draft.apply(source, (Row(f"{ours}.metric", (f"{FILTER}.metric",), lambda name: METRICS.get(str(name))),))
    factor = max(generated, trained) / trained
    batches = -(-int(limit * max(generated, trained)) // trained) if limit > 0 else UNLIMITED_BATCHES
    note = "no limit in verl" if limit <= 0 else f"x {factor:g} batches of data.gen_batch_size" if factor > 1 else ""
    draft.take(source, f"{ours}.max_batches", batches, f"{FILTER}.max_num_gen_batches", note=note)
    if factor > 1:
        draft.changes.append(
            f"data.gen_batch_size={generated} prompts are sampled at a time in verl; here a round samples "
            f"trainer.prompts_per_step={trained}, with up to {batches} rounds per step"
        )


def _list_denominator(run: VerlRun) -> None:
    """List differences in the denominator of means."""
    source, draft = run.source, run.draft
    mode = source.text(f"{ACTOR}.loss_agg_mode")
    if mode == "seq-mean-token-sum-norm":
        scale = source.find(f"{ACTOR}.loss_scale_factor")
        length = run.draft.integer("rollout.max_response_tokens")
        draft.changes.append(
            f"{ACTOR}.loss_agg_mode={mode} divides by "
            + (f"{scale.shown}" if scale is not None and scale.value else "the padded length of the responses")
            + f" in verl; here always by rollout.max_response_tokens={length}"
        )
    elif mode is not None and mode.startswith("seq-mean"):
        draft.changes.append(
            f"{ACTOR}.loss_agg_mode={mode} divides by all responses of a mini-batch; here by those with a trained token"
        )
    critic = source.find(f"{CRITIC}.loss_agg_mode")
    if critic is not None and critic.value != mode:
        draft.changes.append(f"{critic.shown}: the value loss has algorithm.loss_aggregation, like the policy loss")
    source.find(f"{ACTOR}.loss_scale_factor")


def _unless(default: object) -> Callable[[object], object]:
    return lambda value: SKIP if value == default else value
