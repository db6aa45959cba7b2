"""slime's Megatron arguments: layout, recomputation, optimizer, experts."""

from __future__ import annotations

from mcore_rl.migration.draft import SKIP, Row
from mcore_rl.migration.slime.run import SlimeRun

SIZES = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
    "first_stage_layers": "decoder-first-pipeline-num-layers",
    "last_stage_layers": "decoder-last-pipeline-num-layers",
    "pipeline_layout": "pipeline-model-parallel-layout",
}
OPTIMIZER = {
    "lr": "lr",
    "weight_decay": "weight-decay",
    "beta1": "adam-beta1",
    "beta2": "adam-beta2",
    "eps": "adam-eps",
    "clip_grad": "clip-grad",
}
LOSS_SCALE = {
    "initial": "initial-loss-scale",
    "minimum": "min-loss-scale",
    "window": "loss-scale-window",
    "hysteresis": "hysteresis",
}
BALANCING = {"none": SKIP, "aux_loss": "aux_loss", "seq_aux_loss": "seq_aux_loss", "global_aux_loss": "global_aux_loss"}
MOE_ROWS = (
    Row("actor.moe.aux_loss_coefficient", ("moe-aux-loss-coeff",)),
    Row("actor.moe.z_loss_coefficient", ("moe-z-loss-coeff",)),
    Row("actor.moe.bias_update_rate", ("moe-router-bias-update-rate",)),
    Row("actor.moe.load_balancing", ("moe-router-load-balancing-type",), lambda value: BALANCING.get(str(value))),
)


def translate_ranks(run: SlimeRun) -> None:
    """Translate the layout, recomputation, experts, optimizer and offloading; the critic has the actor's."""
    source, draft = run.source, run.draft
    draft.apply(source, [Row(f"actor.parallel.{ours}", (theirs,)) for ours, theirs in SIZES.items()])
    tp, ep = draft.integer("actor.parallel.tp"), draft.integer("actor.parallel.ep")
    if ep > 1 and tp > 1 and "actor.parallel.etp" not in draft.values:
        draft.take(source, "actor.parallel.etp", tp, "expert-tensor-parallel-size", note="Megatron's is tp")
    if ep == 1 and not source.is_set("num-experts"):
        # Scripts for dense models set it too, and it is rejected for a model without experts.
        draft.drop("actor.parallel.etp")
    _translate_chunks(run)
    if source.text("train-backend") == "fsdp":
        note = "FSDP shards weights, gradients and optimizer state"
        draft.take(source, "actor.parallel.shard_parameters", True, "train-backend", note=note)
    _translate_optimizer(run)
    if source.flag("fp16"):
        draft.take(source, "model.dtype", "float16", "fp16")
        rows = [Row(f"actor.optimizer.loss_scale.{ours}", (theirs,)) for ours, theirs in LOSS_SCALE.items()]
        draft.apply(source, rows)
    _translate_recompute(run)
    _translate_experts(run)
    draft.apply(source, [Row("actor.fp8", ("fp8-recipe",))] if source.is_set("fp8-format") else [])
    if source.flag("enable-mtp-training"):
        weight = source.number("mtp-loss-scaling-factor")
        draft.take(source, "actor.mtp_loss_coefficient", weight, "mtp-loss-scaling-factor")
    _translate_offload(run)
    source.find("mtp-loss-scaling-factor")
    if draft.values.get("algorithm.advantage") == "gae":
        _copy_to_critic(run)


def _translate_optimizer(run: SlimeRun) -> None:
    source, draft = run.source, run.draft
    draft.apply(source, [Row(f"actor.optimizer.{ours}", (theirs,)) for ours, theirs in OPTIMIZER.items()])
    if (source.text("optimizer") or "adam") != "adam":
        draft.block(source.effective("optimizer"), "the optimizer is Adam with decoupled weight decay")
    if source.flag("optimizer-cpu-offload"):
        draft.take(source, "actor.optimizer.cpu_offload", True, "optimizer-cpu-offload")


def _translate_experts(run: SlimeRun) -> None:
    source, draft = run.source, run.draft
    draft.apply(source, MOE_ROWS)
    dispatcher = source.text("moe-token-dispatcher-type")
    if source.flag("moe-enable-deepep") or dispatcher == "flex":
        draft.take(source, "actor.moe.dispatcher", "deepep", "moe-enable-deepep", "moe-token-dispatcher-type")
    elif dispatcher in ("alltoall", "allgather"):
        draft.take(source, "actor.moe.dispatcher", dispatcher, "moe-token-dispatcher-type")


def _translate_offload(run: SlimeRun) -> None:
    """Offload the trainer's states during generation, as slime does with --colocate."""
    source, draft = run.source, run.draft
    if source.flag("colocate") and not source.flag("no-offload-train") and not run.is_supervised:
        sharded = draft.values.get("actor.parallel.shard_parameters")
        # Gradients of sharded parameters have no memory between updates.
        for part in ("params", "optimizer") if sharded else ("params", "grads", "optimizer"):
            if part != "optimizer" or not draft.values.get("actor.optimizer.cpu_offload"):
                draft.set(f"actor.offload.{part}", True, "slime offloads the trainer with --colocate")
    source.find("offload-train", "no-offload-train", "offload")


def _translate_chunks(run: SlimeRun) -> None:
    """Translate Megatron's virtual stages: layers per chunk, or chunks per stage."""
    source, draft = run.source, run.draft
    draft.apply(source, [Row("actor.parallel.vpp", ("num-virtual-stages-per-pipeline-rank",))])
    layers, total = source.integer("num-layers-per-virtual-pipeline-stage"), source.integer("num-layers")
    if layers > 0 and total > 0:
        chunks = total // (layers * max(draft.integer("actor.parallel.pp"), 1))
        key = "num-layers-per-virtual-pipeline-stage"
        draft.take(source, "actor.parallel.vpp", max(chunks, 1), key, note=f"{total} layers / stages / {layers}")


def _translate_recompute(run: SlimeRun) -> None:
    source, draft = run.source, run.draft
    draft.apply(source, [Row("actor.recompute", ("recompute-granularity",))])
    if source.flag("gradient-checkpointing"):
        draft.take(source, "actor.recompute", "full", "gradient-checkpointing")
    mode = draft.values.get("actor.recompute")
    if mode == "full":
        draft.apply(source, [Row("actor.recompute_layers", ("recompute-num-layers",))])
    modules = source.find("recompute-modules")
    if mode == "selective" and modules is not None:
        names = modules.value if isinstance(modules.value, list) else [modules.value]
        draft.set("actor.recompute_modules", names, modules.origin)
    source.find("recompute-num-layers", "recompute-method")


def _copy_to_critic(run: SlimeRun) -> None:
    """Copy the actor's layout and optimizer to the critic, which slime builds with the same arguments."""
    draft = run.draft
    names = ("parallel.", "recompute", "tokens_per_microbatch", "optimizer.", "num_ranks", "offload.")
    for key in [key for key in draft.values if key.startswith(tuple(f"actor.{name}" for name in names))]:
        draft.set(key.replace("actor.", "critic.", 1), draft.values[key], f"like {key}")
    if run.source.is_set("megatron-config-path"):
        setting = run.source.effective("megatron-config-path")
        draft.choices.append(f"{setting.shown}: arguments of the critic are in this file; set critic.*")
