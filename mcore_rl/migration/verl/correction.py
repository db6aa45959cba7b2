"""verl's correction between engine and trainer: `algorithm.rollout_correction`, and its keys before verl 0.6."""

from __future__ import annotations

from mcore_rl.migration.verl.defaults import ACTOR
from mcore_rl.migration.verl.run import VerlRun

CORRECTION = "algorithm.rollout_correction"
RS_THRESHOLDS = ("rollout_rs_threshold", "rollout_rs_threshold_lower")
LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric", "seq_max": "any_token"}
MEASURES = {"k1": "ratio", "k2": "k2", "k3": "k3"}
OLD_REJECTIONS = ("token", "sequence", "geometric")
"""Kinds of rejection before verl 0.7, with our names of the levels."""
REJECTIONS = {name: (name, "ratio") for name in OLD_REJECTIONS} | {
    f"{unit}_{kind}": (level, measure)
    for unit, level in LEVELS.items()
    for kind, measure in MEASURES.items()
    if (unit, kind) != ("seq_max", "k1")
}
"""Kind of rejection -> our level and measure."""


def translate_correction(run: VerlRun) -> None:
    """Translate the correction between engine and trainer: weights (IS), rejection (RS), and the veto of a token."""
    source, draft = run.source, run.draft
    level, veto = source.text(f"{CORRECTION}.rollout_is"), _veto(run)
    # verl accepts a list with commas and drops repeated names.
    names = dict.fromkeys((source.text(f"{CORRECTION}.rollout_rs") or "").split(","))
    rejections = [name.strip() for name in names if name.strip()]
    if unknown := [name for name in rejections if name not in REJECTIONS]:
        known = ", ".join(name for name in REJECTIONS if name not in OLD_REJECTIONS)
        draft.block(source.effective(f"{CORRECTION}.rollout_rs"), f"{unknown[0]} is none of {known}")
    elif veto is not None or len(rejections) > 1 or (level is not None and rejections):
        _translate_list(run, level, rejections, veto)
    elif level is not None:
        bounds = _bounds(run, f"{CORRECTION}.rollout_is_threshold")
        draft.set("algorithm.correction.kind", "mask" if bounds[0] else "truncate", f"{CORRECTION}.rollout_is")
        draft.take(source, "algorithm.correction.level", level, f"{CORRECTION}.rollout_is")
        _set_bounds(run, bounds, f"{CORRECTION}.rollout_is_threshold")
    elif rejections:
        of_level, measure = REJECTIONS[rejections[0]]
        draft.set("algorithm.correction.kind", "reject", f"{CORRECTION}.rollout_rs")
        draft.take(source, "algorithm.correction.level", of_level, f"{CORRECTION}.rollout_rs")
        if measure != "ratio":
            draft.set("algorithm.correction.measure", measure, f"{CORRECTION}.rollout_rs")
        [bounds] = _rejection_bounds(run, rejections)
        _set_bounds(run, bounds, f"{CORRECTION}.rollout_rs_threshold")
        _note_denominator(run, f"{CORRECTION}.rollout_rs")
    else:
        _translate_old_correction(run)
    _block_correction_options(run)
    reads_engine = draft.values.get("algorithm.policy_loss.name") in ("dppo_tv", "dppo_kl")
    if bypasses(run) and not reads_engine:
        draft.changes.append(
            f"{CORRECTION}.bypass_mode uses the engine's log-probabilities as the old policy; here the trainer "
            "recomputes them, and algorithm.correction weighs the difference; algorithm.old_logp=rollout, without "
            "weights in algorithm.correction, does the same as verl"
        )
    source.find(*(f"{CORRECTION}.{name}" for name in ("rollout_is_threshold", *RS_THRESHOLDS)))


def bypasses(run: VerlRun) -> bool:
    """Return True if verl uses the engine's log-probabilities as the old policy."""
    bypassed = run.source.flag(f"{CORRECTION}.bypass_mode") or run.source.flag(f"{ACTOR}.use_rollout_log_probs")
    return bypassed or run.is_fully_asynchronous


def _translate_list(run: VerlRun, level: str | None, rejections: list[str], veto: float | None) -> None:
    """Translate several corrections, or the veto of a token, to algorithm.corrections."""
    source, draft = run.source, run.draft
    entries: list[dict[str, object]] = []
    if level is not None:
        low, high = _bounds(run, f"{CORRECTION}.rollout_is_threshold")
        entries.append({"kind": "mask" if low else "truncate", "level": level, "low": low, "high": high})
    for name, (low, high) in zip(rejections, _rejection_bounds(run, rejections), strict=False):
        of_level, measure = REJECTIONS[name]
        entry: dict[str, object] = {"kind": "reject", "level": of_level, "high": high}
        # Without a lower bound, both sides use its default: 1 / high for a ratio, else none.
        entries.append(entry | ({"low": low} if low else {}) | ({"measure": measure} if measure != "ratio" else {}))
    if veto is not None:
        entries.append({"kind": "reject", "level": "any_token", "low": veto, "high": None})
    origin = f"{CORRECTION}.rollout_rs" if rejections else f"{CORRECTION}.rollout_token_veto_threshold"
    draft.set("algorithm.corrections", entries, origin)
    _note_denominator(run, origin)
    source.find(f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs")


def _note_denominator(run: VerlRun, origin: str) -> None:
    run.draft.changes.append(
        f"{origin}: dropped tokens have no loss, but here they still count in the number of tokens that the loss is "
        "divided by"
    )


def _veto(run: VerlRun) -> float | None:
    """Read the weight below which a token drops its response."""
    key = f"{CORRECTION}.rollout_token_veto_threshold"
    return run.source.number(key) if run.source.text(key) is not None else None


def _translate_old_correction(run: VerlRun) -> None:
    """Translate the correction's keys of verl 0.5 and 0.6, before the section rollout_correction."""
    source, draft = run.source, run.draft
    cap, enabled = f"{ACTOR}.tis_imp_ratio_cap", "algorithm.rollout_is"
    if source.number(cap) > 0:
        draft.take(source, "algorithm.correction.kind", "truncate", cap)
        draft.take(source, "algorithm.correction.high", source.number(cap), cap)
    elif source.flag(enabled) and source.is_set("algorithm.rollout_is_threshold"):
        mode = source.text("algorithm.rollout_is_mode") or "truncate"
        draft.take(source, "algorithm.correction.kind", mode, enabled)
        level = source.text("algorithm.rollout_is_level") or "token"
        draft.take(source, "algorithm.correction.level", level, "algorithm.rollout_is_level", enabled)
        high = source.number("algorithm.rollout_is_threshold")
        draft.take(source, "algorithm.correction.high", high, "algorithm.rollout_is_threshold")
        if mode == "mask":
            low = source.number("algorithm.rollout_is_threshold_lower") or 1 / max(high, 1)
            draft.set("algorithm.correction.low", float(f"{low:.12g}"), "algorithm.rollout_is_threshold_lower")


def _block_correction_options(run: VerlRun) -> None:
    """Add blockers for parts of the correction that do not exist here."""
    source, draft = run.source, run.draft
    if source.flag(f"{CORRECTION}.rollout_is_batch_normalize"):
        draft.block(source.effective(f"{CORRECTION}.rollout_is_batch_normalize"), "weights are not normalized here")
    if source.text("algorithm.rollout_is_veto_threshold") is not None:
        draft.block(
            source.effective("algorithm.rollout_is_veto_threshold"),
            "add an entry of kind reject and level any_token to algorithm.corrections",
        )
    losses = (f"{CORRECTION}.loss_type", f"{CORRECTION}.use_policy_gradient")
    if source.text(losses[0]) not in (None, "ppo_clip") or source.flag(losses[1]):
        draft.block(source.effective(*losses), "the loss without clipping is policy_loss.loss_mode=gpg")


def _rejection_bounds(run: VerlRun, rejections: list[str]) -> list[tuple[float, float]]:
    """Read the bounds of each rejection; a single one applies to all. Before verl 0.7, the lower one has its own key;
    its default is 1 / upper."""
    keys = [f"{CORRECTION}.{name}" for name in RS_THRESHOLDS]
    if rejections and rejections[0] in OLD_REJECTIONS:
        high = run.source.number(keys[0]) or run.source.number(f"{CORRECTION}.rollout_is_threshold")
        return [(run.source.number(keys[1]) or float(f"{1 / max(high, 1):.12g}"), high)]
    setting = run.source.effective(keys[0])
    texts = str(setting.value).split(",")
    if len(texts) not in (1, len(rejections)):
        run.source.problems.append(
            f"{setting.shown} has {len(texts)} thresholds for {len(rejections)} kinds of rejection"
        )
    bounds = [_bounds(run, keys[0], text.strip()) for text in texts]
    return bounds * len(rejections) if len(bounds) == 1 else bounds


def _bounds(run: VerlRun, key: str, text: str | None = None) -> tuple[float, float]:
    """Read `high` or `low_high` from `text`, by default the value of `key`; the lower bound is 0 if it is missing."""
    setting = run.source.effective(key)
    low, separator, high = (str(setting.value) if text is None else text).partition("_")
    if setting.value is None:
        return 0.0, 2.0
    try:
        return (float(low), float(high)) if separator else (0.0, float(low))
    except ValueError:
        run.source.problems.append(f"{setting.shown} is no number, and no pair of numbers such as 0.5_2.0")
        return 0.0, 2.0


def _set_bounds(run: VerlRun, bounds: tuple[float, float], key: str) -> None:
    if bounds[0]:
        run.draft.set("algorithm.correction.low", bounds[0], run.source.effective(key).origin)
    run.draft.take(run.source, "algorithm.correction.high", bounds[1], key)
