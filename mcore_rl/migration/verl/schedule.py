"""verl's section `trainer` and the sizes of batches: steps, learning rate schedule, checkpoints, validation."""

from __future__ import annotations

from mcore_rl.config.observe import LOCAL_TRACKER, TRACKERS
from mcore_rl.migration.files import directory_name
from mcore_rl.migration.shell.words import UNKNOWN
from mcore_rl.migration.verl.defaults import ACTOR, CRITIC
from mcore_rl.migration.verl.ranks import SCHEDULES, TrainedModel
from mcore_rl.migration.verl.run import VerlRun

EPOCHS, STEPS = "trainer.total_epochs", "trainer.total_training_steps"


def translate_schedule(run: VerlRun) -> None:
    """Translate batches, steps, validation, checkpoints and the run's directory."""
    _translate_batches(run)
    translate_steps(run)
    translate_intervals(run)
    source, draft = run.source, run.draft
    draft.take(source, "trainer.validate_before", source.flag("trainer.val_before_train"), "trainer.val_before_train")
    if source.flag("trainer.val_only"):
        draft.changes.append("trainer.val_only=True: use `mcore-rl eval CONFIG.yaml`")


def _translate_batches(run: VerlRun) -> None:
    source, draft = run.source, run.draft
    mini, samples = run.prompts_per_update, run.samples
    if run.is_fully_asynchronous:
        keys = ("async_training.trigger_parameter_sync_step", "async_training.require_batches")
        note = f"x {keys[1]} x {ACTOR}.ppo_mini_batch_size={mini}"
        draft.take(source, "trainer.prompts_per_step", run.prompts_per_step, *keys, note=note)
        source.find("data.train_batch_size", "data.gen_batch_size")
    else:
        draft.take(source, "trainer.prompts_per_step", run.prompts_per_step, "data.train_batch_size")
    draft.take(source, "trainer.prompts_per_update", mini, f"{ACTOR}.ppo_mini_batch_size")
    epochs = source.integer(f"{ACTOR}.ppo_epochs")
    draft.take(source, "trainer.update_epochs", max(epochs, 1), f"{ACTOR}.ppo_epochs")
    draft.changes.append(
        f"trainer.prompts_per_step={run.prompts_per_step} and trainer.prompts_per_update={mini} count prompts, like "
        f"data.train_batch_size and ppo_mini_batch_size; an update has {mini} x {samples} responses"
    )


def translate_steps(run: VerlRun) -> None:
    """Translate the number of steps: given, or from epochs and the number of prompts."""
    source, draft = run.source, run.draft
    steps, epochs, batch = source.integer(STEPS), source.integer(EPOCHS), max(run.prompts_per_step, 1)
    prompts = source.integer("rollout.total_rollout_steps") if run.is_fully_asynchronous else 0
    if steps > 0:
        draft.take(source, "trainer.steps", steps, STEPS)
    elif prompts > 0:
        note = f"{prompts} prompts / {batch}"
        draft.take(source, "trainer.steps", max(prompts // batch, 1), "rollout.total_rollout_steps", note=note)
    elif run.rows is not None:
        value = max(epochs * (run.rows // batch), 1)
        draft.take(source, "trainer.steps", value, EPOCHS, note=f"{epochs} epochs x {run.rows} prompts / {batch}")
    else:
        draft.choices.append(
            f"trainer.steps: {EPOCHS}={epochs} is {epochs} x (number of prompts / {batch}) steps; set it, or add "
            "--rows NUMBER_OF_PROMPTS"
        )
    source.find(STEPS, EPOCHS, "rollout.total_epochs", "rollout.total_rollout_steps")


def translate_learning_rate(run: VerlRun, model: TrainedModel, updates: int) -> None:
    """Translate warm-up and decay. `updates`: optimizer updates per step of verl's schedule."""
    source, draft, theirs, ours = run.source, run.draft, model.optimizer, f"{model.section}.optimizer"
    steps, ratio = source.integer(f"{theirs}.lr_warmup_steps"), source.number(f"{theirs}.lr_warmup_steps_ratio")
    note = f"x {updates} updates per step of verl's schedule" if updates > 1 else ""
    if steps > 0:
        draft.take(source, f"{ours}.warmup_steps", steps * updates, f"{theirs}.lr_warmup_steps", note=note)
    elif ratio > 0 and "trainer.steps" in draft.values:
        total = int(ratio * draft.integer("trainer.steps")) * updates
        key = f"{theirs}.lr_warmup_steps_ratio"
        draft.take(source, f"{ours}.warmup_steps", total, key, note=f"{ratio:g} of all steps {note}".strip())
    elif ratio > 0:
        draft.choices.append(
            f"{ours}.warmup_steps: {source.effective(f'{theirs}.lr_warmup_steps_ratio').shown} of all updates; set it "
            "together with trainer.steps"
        )
    names = (
        f"{theirs}.lr_decay_style",
        f"{theirs}.lr_scheduler_type",
        f"{theirs}.warmup_style",
        f"{theirs}.lr_scheduler",
    )
    style = source.text(*names) or "constant"
    schedule = SCHEDULES.get(style)
    if schedule is None:
        draft.block(source.effective(*names), f"the schedules are {', '.join(SCHEDULES)}")
    elif schedule != "constant":
        draft.take(source, f"{ours}.schedule", schedule, *names)
        _translate_decay(run, model, updates)
    source.find(f"{theirs}.lr_warmup_steps", f"{theirs}.lr_decay_steps", f"{theirs}.min_lr", f"{theirs}.min_lr_ratio")
    if updates > 1 and steps > 0:
        draft.changes.append(
            f"{ours}.warmup_steps counts optimizer updates. verl's schedule advances once for {updates} updates, so "
            "the learning rate is constant within a step there"
        )


def _translate_decay(run: VerlRun, model: TrainedModel, updates: int) -> None:
    source, draft, theirs, ours = run.source, run.draft, model.optimizer, f"{model.section}.optimizer"
    decay = source.integer(f"{theirs}.lr_decay_steps")
    if decay > 0:
        note = f"x {updates} updates per step" if updates > 1 else ""
        draft.take(source, f"{ours}.decay_steps", decay * updates, f"{theirs}.lr_decay_steps", note=note)
    ratio = source.number(f"{theirs}.min_lr_ratio")
    if ratio > 0:
        rate = source.number(f"{theirs}.lr")
        draft.take(
            source, f"{ours}.min_lr", float(f"{ratio * rate:.12g}"), f"{theirs}.min_lr_ratio", note=f"of {rate:g}"
        )
    elif source.number(f"{theirs}.min_lr") > 0:
        draft.take(source, f"{ours}.min_lr", source.number(f"{theirs}.min_lr"), f"{theirs}.min_lr")


def translate_intervals(run: VerlRun) -> None:
    """Translate the intervals of validation and checkpoints, and the run's directory."""
    source, draft = run.source, run.draft
    for ours, theirs in (
        ("trainer.validate_every_steps", ("trainer.test_freq", "rollout.test_freq")),
        ("checkpoint.every_steps", ("trainer.save_freq",)),
    ):
        setting = source.effective(*theirs)
        if setting.value == "after_each_epoch":
            draft.choices.append(f"{ours}: {setting.shown}; set the number of steps of an epoch")
            continue
        interval = source.integer(*theirs)
        draft.take(source, ours, max(interval, 0), *theirs, note="" if interval > 0 else "never, and at the end")
    keep = ("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep")
    if source.integer(*keep) > 0:
        draft.take(source, "checkpoint.keep_last", source.integer(*keep), *keep)
    elif draft.values.get("checkpoint.every_steps"):
        draft.defaults.append("checkpoint.keep_last = 2; verl keeps all checkpoints by default")
    asynchronous = (f"{ACTOR}.checkpoint.async_save", "checkpoint.async_save")
    if source.flag(*asynchronous):
        draft.take(source, "checkpoint.async_save", True, *asynchronous)
    source.find("trainer.max_critic_ckpt_to_keep", f"{CRITIC}.checkpoint.async_save")
    name = source.text("trainer.experiment_name")
    origin = source.effective("trainer.experiment_name").origin if name else "the script's name"
    draft.set("run.dir", f"runs/{directory_name(name or '') or directory_name(source.name) or 'imported'}", origin)
    if source.is_set("trainer.default_local_dir"):
        draft.changes.append(
            f"{source.effective('trainer.default_local_dir').shown} holds verl's checkpoints; "
            f"run.dir={draft.values['run.dir']} is a new directory for all files of the run"
        )
    if copies := source.text("trainer.default_hdfs_dir"):
        draft.set("checkpoint.copy_to", copies, source.effective("trainer.default_hdfs_dir").origin)
    source.find("trainer.project_name")
    _translate_trackers(run, name)


def _translate_trackers(run: VerlRun, name: str | None) -> None:
    """Translate trainer.logger. The console and verl's file need no tracker."""
    source, draft = run.source, run.draft
    loggers = source.effective("trainer.logger").value
    trackers = [each for each in TRACKERS if each in (loggers if isinstance(loggers, list) else [loggers])]
    others = [each for each in trackers if each != LOCAL_TRACKER]
    project = source.text("trainer.project_name")
    if not trackers:
        return
    draft.take(source, "observe.trackers", trackers, "trainer.logger")
    if others and project is not None and not UNKNOWN.search(project):
        draft.take(source, "observe.project", project, "trainer.project_name")
    if others and name is not None and not UNKNOWN.search(name):
        draft.take(source, "observe.run_name", name, "trainer.experiment_name")
