"""verl's sections `reward`, `reward_model` and `custom_reward_function`."""

from __future__ import annotations

from mcore_rl.migration.draft import Row
from mcore_rl.migration.verl.run import VerlRun

MANAGERS = {"naive": "naive", "dapo": "dapo", "prime": "prime", "batch": "batch"}
MANAGER_KEYS = ("reward.reward_manager.name", "reward_model.reward_manager")
OVERLONG = (
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.overlong_buffer",
    "reward_model.overlong_buffer",
    "custom_reward_function.overlong_buffer",
)
FUNCTION = ("reward.custom_reward_function", "custom_reward_function")
FUNCTION_PATHS = tuple(f"{key}.path" for key in FUNCTION)
MODEL_KEYS = ("reward.reward_model.model_path", "reward_model.model.path")


def translate_rewards(run: VerlRun) -> None:
    """Translate reward function, manager, overlong punishment and reward model."""
    _translate_function(run)
    _translate_manager(run)
    _translate_overlong(run)
    _translate_reward_model(run)
    run.draft.apply(run.source, (Row("sandbox.url", ("reward.sandbox_fusion.url", "reward_model.sandbox_fusion.url")),))


def _translate_function(run: VerlRun) -> None:
    source, draft = run.source, run.draft
    path = source.text(*FUNCTION_PATHS)
    name = source.text(*(f"{key}.name" for key in FUNCTION)) or "compute_score"
    if path is None:
        draft.set("reward.function", "by_data_source", "verl without custom_reward_function")
        draft.defaults.append(
            "reward.function = by_data_source, verl's rule without custom_reward_function; ours is math"
        )
        return
    # verl also accepts pkg://module.
    module = path.removeprefix("pkg://")
    draft.take(source, "reward.function", f"{module}:{name}", *FUNCTION_PATHS, note=f"function {name}")
    kwargs = {
        key.rpartition(".")[2]: str(setting.value)
        for key, setting in source.settings.items()
        if any(key.startswith(f"{each}.reward_kwargs.") for each in FUNCTION)
    }
    if kwargs:
        keys = [key for key in source.settings if any(key.startswith(f"{each}.reward_kwargs.") for each in FUNCTION)]
        draft.take(source, "reward.kwargs", kwargs, *keys)


def _translate_manager(run: VerlRun) -> None:
    source, draft = run.source, run.draft
    setting = source.effective(*MANAGER_KEYS)
    name = str(setting.value)
    # Other managers have their own classes, such as remote or rate_limited; the function is the same.
    manager = MANAGERS.get(name)
    own_function = source.text(*FUNCTION_PATHS) is not None
    if manager is None:
        draft.changes.append(f"{setting.shown}: reward.manager is prime, which grades responses concurrently")
    elif manager == "batch" and not own_function:
        draft.block(setting, "a batch is graded by a custom_reward_function; set its path")
    elif setting.key in source.settings:
        draft.set("reward.manager", manager, setting.origin)
    elif not own_function:
        # The results of naive and prime are equal for functions without state; prime is faster.
        draft.changes.append(
            "reward_manager=naive grades one response at a time in verl; here reward.manager=prime "
            "grades several at a time, with the same scores"
        )
    for key in ("reward.reward_manager.source", "reward.reward_manager.module.path"):
        found = source.find(key)
        if found is not None and found.value not in (None, "register"):
            draft.block(found, "a reward manager of your own; write its rule as reward.function (docs/rewards.md)")


def _translate_overlong(run: VerlRun) -> None:
    source, draft = run.source, run.draft

    def keys(name: str) -> tuple[str, ...]:
        return tuple(f"{prefix}.{name}" for prefix in OVERLONG)

    enabled = source.flag(*keys("enable"))
    dapo = draft.values.get("reward.manager") == "dapo"
    if enabled:
        draft.take(source, "reward.overlong.enable", True, *keys("enable"))
        draft.take(source, "reward.overlong.buffer_tokens", source.integer(*keys("len")), *keys("len"))
        draft.take(source, "reward.overlong.penalty", source.number(*keys("penalty_factor")), *keys("penalty_factor"))
    elif dapo:
        # reward.manager=dapo implies the punishment; prime grades in the same way without it.
        draft.set("reward.manager", "prime", f"{draft.origins['reward.manager']}: dapo without overlong_buffer")
    source.find(*keys("len"), *keys("penalty_factor"), *keys("log"))


def _translate_reward_model(run: VerlRun) -> None:
    source, draft = run.source, run.draft
    if not source.flag("reward.reward_model.enable", "reward_model.enable"):
        source.find(*MODEL_KEYS)
        return
    path = source.text(*MODEL_KEYS)
    if path is None:
        draft.block(source.effective("reward_model.enable"), "its model is not set")
        return
    draft.take(source, "reward_model.hf_path", path, *MODEL_KEYS)
    draft.set("reward_model.tokens_per_microbatch", run.longest, "one longest sequence")
    if source.text(*FUNCTION_PATHS) is None:
        draft.set("reward.function", "none", f"{MODEL_KEYS[-1]}: only the model gives rewards")
    draft.changes.append(
        f"{source.effective(*MODEL_KEYS).shown}: a sequence classification model with one label scores on ranks of its "
        "own here (reward_model.*). For a generative model, use section judge instead (docs/rewards.md)"
    )
