"""Translation of a complete verl configuration."""

from __future__ import annotations

from mcore_rl.migration.draft import Draft, Translation
from mcore_rl.migration.source import Setting, Source
from mcore_rl.migration.verl.algorithm import translate_algorithm
from mcore_rl.migration.verl.cluster import translate_cluster
from mcore_rl.migration.verl.data import translate_data
from mcore_rl.migration.verl.defaults import ACTOR, ASYNCHRONOUS, COMMON, CRITIC, OLD_SUPERVISED, ROLLOUT, SUPERVISED
from mcore_rl.migration.verl.lora import translate_lora
from mcore_rl.migration.verl.programs import check_program
from mcore_rl.migration.verl.ranks import POLICY, VALUE_MODEL, translate_budget, translate_ranks
from mcore_rl.migration.verl.rewards import translate_rewards
from mcore_rl.migration.verl.rollout import translate_drafts, translate_rollout
from mcore_rl.migration.verl.run import VerlRun
from mcore_rl.migration.verl.schedule import translate_learning_rate, translate_schedule
from mcore_rl.migration.verl.supervised import translate_supervised
from mcore_rl.migration.verl.uncovered import block_unsupported, list_uncovered

TRAINER_DTYPES = (f"{ACTOR}.fsdp_config.dtype", f"{ACTOR}.megatron.dtype")
ENGINE_DTYPE = f"{ROLLOUT}.dtype"
HALF = ("float16", "fp16", "half", "16")
"""Names of float16 in verl and its engines."""


def translate(settings: dict[str, Setting], rows: int | None = None, name: str = "imported") -> Translation:
    """Translate settings of verl.

    rows: number of training prompts, to compute steps from epochs. name: run.dir of a run without a name.
    """
    source, draft = Source("verl", settings, COMMON, name=name), Draft()
    run = VerlRun(source, draft, rows)
    if run.is_supervised:
        source.defaults = OLD_SUPERVISED if "fsdp_sft" in run.module else SUPERVISED
        translate_supervised(run)
        translate_lora(run, "model")
    else:
        if run.is_fully_asynchronous or run.is_one_step_off:
            source.defaults = COMMON | ASYNCHRONOUS
        _translate_reinforcement(run)
    check_program(run)
    block_unsupported(source, draft)
    return Translation(source, draft, list_uncovered(source))


def _translate_reinforcement(run: VerlRun) -> None:
    translate_data(run)
    translate_algorithm(run)
    translate_rollout(run)
    translate_rewards(run)
    translate_schedule(run)
    translate_cluster(run)
    translate_ranks(run, POLICY)
    _translate_dtype(run)
    translate_drafts(run)
    micro = tuple(f"{ACTOR}.{name}" for name in ("ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size"))
    tokens, dynamic = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.use_dynamic_bsz"
    translate_budget(run, POLICY, tokens=tokens, micro=micro, dynamic=dynamic)
    translate_learning_rate(run, POLICY, run.updates_per_scheduler_step)
    translate_lora(run, "actor_rollout_ref.model")
    if run.draft.values.get("algorithm.advantage") == "gae":
        _translate_critic(run)
    run.source.find("critic.ppo_mini_batch_size", f"{CRITIC}.ppo_epochs", "trainer.critic_warmup")


def _translate_dtype(run: VerlRun) -> None:
    """Translate float16 of trainer and engine, which have one key here; other data types have our default."""
    source, draft = run.source, run.draft
    found = {key: setting for key, setting in source.settings.items() if key in (*TRAINER_DTYPES, ENGINE_DTYPE)}
    half = [key for key, setting in found.items() if str(setting.value) in HALF]
    if any(key in TRAINER_DTYPES for key in half):
        draft.take(source, "model.dtype", "float16", *half)
        if ENGINE_DTYPE not in half:
            draft.changes.append(
                f"{half[0]}: engines compute in float16, too (model.dtype); verl's have {ENGINE_DTYPE}"
            )
    elif half:
        shown = source.effective(ENGINE_DTYPE).shown
        draft.changes.append(f"{shown}: engines compute in the trainer's data type; model.dtype=float16 sets both")


def _translate_critic(run: VerlRun) -> None:
    source, draft = run.source, run.draft
    path = source.text(f"{CRITIC}.model.path")
    if path is not None and path != draft.values.get("model.hf_path"):
        draft.take(source, "critic.hf_path", path, f"{CRITIC}.model.path")
    draft.take(source, "critic.clip_range", source.number(f"{CRITIC}.cliprange_value"), f"{CRITIC}.cliprange_value")
    warmup = source.integer("trainer.critic_warmup")
    draft.take(source, "trainer.critic_warmup_steps", warmup, "trainer.critic_warmup")
    epochs, actor_epochs = source.integer(f"{CRITIC}.ppo_epochs"), max(source.integer(f"{ACTOR}.ppo_epochs"), 1)
    if epochs > actor_epochs:
        note = f"per actor epoch of {actor_epochs}" if actor_epochs > 1 else ""
        draft.take(source, "critic.update_epochs", epochs // actor_epochs, f"{CRITIC}.ppo_epochs", note=note)
    mini = source.find(f"{CRITIC}.ppo_mini_batch_size")
    if mini is not None and mini.value != run.prompts_per_update:
        draft.changes.append(f"{mini.shown}: the critic is updated with the batches of the policy")
    translate_ranks(run, VALUE_MODEL)
    micro = tuple(f"{CRITIC}.{name}" for name in ("ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size"))
    dynamic = f"{CRITIC}.use_dynamic_bsz" if source.is_set(f"{CRITIC}.use_dynamic_bsz") else f"{ACTOR}.use_dynamic_bsz"
    tokens = f"{CRITIC}.ppo_max_token_len_per_gpu"
    translate_budget(run, VALUE_MODEL, tokens=tokens, micro=micro, dynamic=dynamic)
    translate_learning_rate(run, VALUE_MODEL, run.updates_per_scheduler_step)
