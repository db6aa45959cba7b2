"""verl's sections `data` and `actor_rollout_ref.model`: files, prompts, the model's directory."""

from __future__ import annotations

from mcore_rl.migration.draft import SKIP, Row
from mcore_rl.migration.verl.defaults import ROLLOUT
from mcore_rl.migration.verl.run import VerlRun

MODEL = "actor_rollout_ref.model"


def _paths(value: object) -> object:
    paths = value if isinstance(value, list) else [value]
    return [str(path) for path in paths if path] or SKIP


def _positive(value: object) -> object:
    return value if isinstance(value, int) and value > 0 else SKIP


FILES = (
    Row("data.train", ("data.train_files",), _paths),
    Row("data.val", ("data.val_files",), _paths),
    Row("data.val_max_prompts", ("data.val_max_samples",), _positive),
    Row("data.template_kwargs", ("data.apply_chat_template_kwargs",), lambda value: value or SKIP),
)
ROWS = (
    *FILES,
    Row("data.prompt_key", ("data.prompt_key",)),
    Row("data.image_key", ("data.image_key",)),
    Row("data.shuffle", ("data.shuffle",)),
    Row("data.workers", ("data.filter_overlong_prompts_workers",)),
    Row("run.seed", ("data.seed",)),
    Row("rollout.max_prompt_tokens", ("data.max_prompt_length", f"{ROLLOUT}.prompt_length")),
    Row("rollout.max_response_tokens", ("data.max_response_length", f"{ROLLOUT}.response_length")),
    Row("model.tokenizer_path", (f"{MODEL}.tokenizer_path", "data.tokenizer")),
)


def translate_data(run: VerlRun) -> None:
    """Translate the data and the model's directory."""
    source, draft = run.source, run.draft
    draft.apply(source, ROWS)
    take_template_arguments(run)
    translate_model(run, f"{MODEL}.path")
    _translate_long_prompts(run)
    if "data.train" not in draft.values:
        draft.choices.append("data.train: the run has no data.train_files; set it")
    for key in ("data.custom_cls.path", "data.sampler.class_path"):
        setting = source.find(key)
        if setting is not None and setting.value:
            remedy = "write its rows in a format of docs/data.md" if "custom_cls" in key else "see data.curriculum"
            draft.choices.append(f"{setting.shown}: code of verl's data set is not used; {remedy}")
    source.find("data.custom_cls.name", "data.sampler.class_name", "data.return_raw_chat", "data.reward_fn_key")


def take_template_arguments(run: VerlRun) -> None:
    """Translate data.apply_chat_template_kwargs.NAME, which an override sets one by one."""
    prefix = "data.apply_chat_template_kwargs."
    names = [key for key in run.source.settings if key.startswith(prefix)]
    if names:
        values = {name.removeprefix(prefix): run.source.effective(name).value for name in names}
        run.draft.take(run.source, "data.template_kwargs", values, *names)


def translate_model(run: VerlRun, *keys: str) -> None:
    """Translate the model's directory or hub id."""
    source, draft = run.source, run.draft
    path, setting = source.text(*keys), source.find(*keys)
    if path is None and setting is not None and setting.line is not None:
        draft.choices.append(f"model.hf_path: {setting.key} is empty in the script; set the model's directory")
        return
    if path is None:
        source.problems.append(f"{keys[0]} is not set: there is no model to train")
        return
    draft.take(source, "model.hf_path", path, *keys)
    if path.startswith("<"):
        draft.choices.append(f"model.hf_path={path} is a placeholder of the script: set the model's directory")


def _translate_long_prompts(run: VerlRun) -> None:
    source, draft = run.source, run.draft
    truncation, drops = source.text("data.truncation"), source.flag("data.filter_overlong_prompts")
    if drops:
        draft.take(source, "data.long_prompts", "drop", "data.filter_overlong_prompts")
    elif truncation in ("left", "right"):
        draft.take(source, "data.long_prompts", f"truncate_{truncation}", "data.truncation")
    elif truncation == "error":
        draft.changes.append(
            "data.truncation=error stops verl at a prompt longer than data.max_prompt_length; here data.long_prompts="
            "drop leaves it out"
        )
    else:
        draft.block(source.effective("data.truncation"), "prompts are truncated at the left or right, or dropped")
