"""verl's SFT trainers (verl.trainer.sft_trainer, verl.trainer.fsdp_sft_trainer)."""

from __future__ import annotations

from mcore_rl.migration.draft import Row
from mcore_rl.migration.verl.cluster import DEVICES
from mcore_rl.migration.verl.data import FILES, take_template_arguments, translate_model
from mcore_rl.migration.verl.ranks import TrainedModel, translate_budget, translate_ranks
from mcore_rl.migration.verl.run import VerlRun
from mcore_rl.migration.verl.schedule import translate_intervals, translate_learning_rate, translate_steps

MODEL = TrainedModel("actor", "engine", ("engine", "model.fsdp_config"), "optim", "model")
MICRO = ("data.micro_batch_size_per_gpu", "data.micro_batch_size")
PROCESSES = "--nproc_per_node"
ROWS = (
    *(row for row in FILES if row.ours in ("data.train", "data.template_kwargs")),
    Row("data.answer_key", ("data.response_key",)),
    Row("data.prompt_key", ("data.prompt_key",)),
    Row("run.seed", ("trainer.seed",)),
)


def translate_supervised(run: VerlRun) -> None:
    """Translate a run of an SFT trainer to algorithm.policy_loss.name=sft."""
    source, draft = run.source, run.draft
    draft.set("algorithm.policy_loss.name", "sft", f"{run.module or 'SFT trainer'}")
    draft.apply(source, ROWS)
    take_template_arguments(run)
    translate_model(run, "model.path", "model.partial_pretrain")
    if source.is_set("data.messages_key") or source.flag("data.multiturn.enable"):
        draft.choices.append(
            f"{source.effective('data.messages_key', 'data.multiturn.messages_key').shown}: all assistant messages of "
            "a conversation are trained in verl; here data.prompt_key is the conversation up to the answer, and "
            "data.answer_key the answer"
        )
    for key in ("data.prompt_dict_keys", "data.response_dict_keys"):
        fields = source.find(key)
        if fields is not None and fields.value:
            draft.choices.append(f"{fields.shown}: fields of a column of records; write them as columns of their own")
    source.find("data.multiturn.messages_key", "data.multiturn.tools_key", "data.tools_key")
    validation = source.find("data.val_files")
    if validation is not None and validation.value:
        draft.changes.append(f"{validation.shown}: supervised training does not validate here")
    _translate_lengths(run)
    draft.take(source, "trainer.prompts_per_step", source.integer("data.train_batch_size"), "data.train_batch_size")
    draft.take(source, "trainer.prompts_per_update", source.integer("data.train_batch_size"), "data.train_batch_size")
    translate_steps(run)
    translate_intervals(run)
    draft.drop("trainer.validate_every_steps")
    translate_ranks(run, MODEL)
    dynamic = "data.use_dynamic_bsz"
    translate_budget(run, MODEL, tokens="data.max_token_len_per_gpu", micro=MICRO, dynamic=dynamic)
    translate_learning_rate(run, MODEL, 1)
    draft.drop("actor.offload.")
    _translate_devices(run)


def _translate_lengths(run: VerlRun) -> None:
    """Translate data.max_length, which bounds prompt and answer together."""
    source, draft = run.source, run.draft
    longest = source.integer("data.max_length")
    draft.take(source, "rollout.max_prompt_tokens", longest // 2, "data.max_length", note="one half of it")
    draft.take(source, "rollout.max_response_tokens", longest - longest // 2, "data.max_length", note="one half of it")
    draft.changes.append(
        f"data.max_length={longest} bounds prompt and answer together; here rollout.max_prompt_tokens and "
        "rollout.max_response_tokens bound each of them, and are set to one half"
    )
    source.find("data.truncation")


def _translate_devices(run: VerlRun) -> None:
    source, draft = run.source, run.draft
    device = source.text("trainer.device") or "cuda"
    draft.set("cluster.device", DEVICES.get(device, "cuda"), source.effective("trainer.device").origin)
    draft.take(
        source, "cluster.nodes", max(source.integer("--nnodes", "trainer.nnodes"), 1), "--nnodes", "trainer.nnodes"
    )
    gpus = source.integer(PROCESSES, "--nproc-per-node", "trainer.n_gpus_per_node")
    draft.take(source, "cluster.gpus_per_node", max(gpus, 1), PROCESSES, "--nproc-per-node", "trainer.n_gpus_per_node")
