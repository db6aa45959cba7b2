"""slime's data arguments, checkpoints and rewards."""

from __future__ import annotations

import os

from mcore_rl.migration.draft import SKIP, Row
from mcore_rl.migration.files import directory_name
from mcore_rl.migration.slime.run import SlimeRun

GRADERS = {"math": "math_boxed", "deepscaler": "math_boxed", "dapo": "math_dapo", "boxed_math": "math_boxed"}
"""Built-in rules with a similar grader."""
ROWS = (
    Row(
        "data.train", ("prompt-data",), lambda paths: [str(path) for path in paths] if isinstance(paths, list) else SKIP
    ),
    Row("data.prompt_key", ("input-key",)),
    Row("data.answer_key", ("label-key",)),
    Row("data.template_kwargs", ("apply-chat-template-kwargs",), lambda value: value or SKIP),
    Row("run.seed", ("rollout-seed",)),
    Row("model.tokenizer_path", ("tokenizer-model",)),
)


def translate_data(run: SlimeRun) -> None:
    """Translate the model, the data, the directories and the reward."""
    source, draft = run.source, run.draft
    draft.apply(source, ROWS)
    path = source.text("hf-checkpoint")
    if path is None:
        source.problems.append("--hf-checkpoint is not set: there is no model to train")
    else:
        draft.take(source, "model.hf_path", path, "hf-checkpoint")
    for name in ("load", "ref-load"):
        setting = source.find(name)
        if setting is not None:
            use = (
                "the reference is the initial policy, or reference.hf_path"
                if name == "ref-load"
                else "run.dir resumes a run"
            )
            draft.changes.append(
                f"{setting.shown} is a Megatron checkpoint; weights come from model.hf_path here, and {use}"
            )
    save = source.text("save")
    name = os.path.basename((save or "").rstrip("/"))
    origin = source.effective("save").origin if name else "the script's name"
    draft.set("run.dir", f"runs/{directory_name(name) or directory_name(source.name) or 'imported'}", origin)
    if not source.flag("apply-chat-template") and not run.is_supervised:
        draft.take(source, "data.template", "plain", "apply-chat-template", note="without the flag, prompts are texts")
    draft.take(source, "data.shuffle", source.flag("rollout-shuffle"), "rollout-shuffle")
    _translate_validation(run)
    if not run.is_supervised:
        _translate_reward(run)
    _translate_trackers(run)


def _translate_trackers(run: SlimeRun) -> None:
    """Translate --use-wandb and --use-tensorboard."""
    source, draft = run.source, run.draft
    names = {"wandb": "use-wandb", "tensorboard": "use-tensorboard"}
    used = {name: flag for name, flag in names.items() if source.flag(flag)}
    if used:
        draft.take(source, "observe.trackers", list(used), *used.values())
    for ours, theirs in (("project", "wandb-project"), ("run_name", "wandb-group")):
        if "wandb" in used and source.is_set(theirs):
            draft.take(source, f"observe.{ours}", source.text(theirs), theirs)


def _translate_validation(run: SlimeRun) -> None:
    """Translate --eval-prompt-data NAME PATH ..., and the intervals of validation."""
    source, draft = run.source, run.draft
    pairs = source.effective("eval-prompt-data").value
    if isinstance(pairs, list) and len(pairs) >= 2:
        sets = {str(name): str(path) for name, path in zip(pairs[::2], pairs[1::2], strict=False)}
        value = {name: [path] for name, path in sets.items()} if len(sets) > 1 else list(sets.values())
        draft.take(source, "data.val_sets" if len(sets) > 1 else "data.val", value, "eval-prompt-data")
    draft.take(source, "trainer.validate_every_steps", source.integer("eval-interval"), "eval-interval")
    before = not source.flag("skip-eval-before-train")
    draft.take(source, "trainer.validate_before", before, "skip-eval-before-train")
    draft.take(source, "checkpoint.every_steps", source.integer("save-interval"), "save-interval")
    if source.flag("async-save"):
        draft.take(source, "checkpoint.async_save", True, "async-save")
    if source.text("save-hf") is not None:
        draft.choices.append(f"{source.effective('save-hf').shown}: set trainer.export_hf, or convert a checkpoint")
    for key in ("eval-config", "eval-function-path"):
        setting = source.find(key)
        if setting is not None:
            draft.choices.append(f"{setting.shown}: is not read; set data.val or data.val_sets (docs/data.md)")
    for key in ("eval-max-response-len", "eval-max-prompt-len", "eval-max-context-len"):
        setting = source.find(key)
        if setting is not None:
            draft.changes.append(f"{setting.shown}: validation has the limits of training here")


def _translate_reward(run: SlimeRun) -> None:
    source, draft = run.source, run.draft
    custom, rule = source.text("custom-rm-path"), source.text("rm-type")
    if custom is not None:
        module, _, name = custom.rpartition(".")
        setting = source.effective("custom-rm-path")
        draft.set("reward.function", f"{module or name}:{name}", setting.origin)
        draft.choices.append(
            f"{setting.shown} is called as f(args, sample) in slime; reward.function is called as f(data_source, "
            "solution_str, ground_truth, extra_info) and may be async (docs/rewards.md)"
        )
    elif rule in GRADERS:
        draft.take(source, "reward.function", GRADERS[rule], "rm-type")
        draft.changes.append(
            f"--rm-type={rule}: reward.function={GRADERS[rule]} is a similar grader, not the same code"
        )
    elif rule is not None:
        draft.block(source.effective("rm-type"), "there is no such grader; write reward.function (docs/rewards.md)")
    source.find("rm-type", "reward-key", "eval-reward-key")
    if source.flag("group-rm"):
        draft.choices.append("--group-rm: a function that grades a group needs reward.manager=batch (docs/rewards.md)")
