"""Models on trainer ranks: layout, optimizer, offloading and micro-batches of verl's actor and critic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mcore_rl.migration.draft import SKIP, Row
from mcore_rl.migration.verl.defaults import ACTOR, CRITIC
from mcore_rl.migration.verl.run import VerlRun

SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
LAYER_NAMES = {
    "first_stage_layers": "num_layers_in_first_pipeline_stage",
    "last_stage_layers": "num_layers_in_last_pipeline_stage",
    "pipeline_layout": "pipeline_model_parallel_layout",
}
MOE = {
    "aux_loss_coefficient": "moe_aux_loss_coeff",
    "z_loss_coefficient": "moe_z_loss_coeff",
    "bias_update_rate": "moe_router_bias_update_rate",
    "load_balancing": "moe_router_load_balancing_type",
}
SCHEDULES = {"constant": "constant", "cosine": "cosine", "linear": "linear"}
BALANCING = {"none": SKIP, "aux_loss": "aux_loss", "seq_aux_loss": "seq_aux_loss", "global_aux_loss": "global_aux_loss"}


@dataclass(frozen=True)
class TrainedModel:
    """A model that verl trains: our section, and the prefixes of its keys.

    engine: prefixes of Megatron's or FSDP's keys. optimizer: prefix of the optimizer's keys. model: prefix of the keys
    of its Hugging Face model.
    """

    section: str
    role: str
    engine: tuple[str, ...]
    optimizer: str
    model: str

    def keys(self, name: str) -> tuple[str, ...]:
        """Return the names of a key of the training backend."""
        return tuple(f"{prefix}.{name}" for prefix in self.engine)

    def transformer(self, name: str) -> tuple[str, ...]:
        """Return the names of a key that is passed to Megatron's TransformerConfig."""
        return self.keys(f"override_transformer_config.{name}")


BACKENDS = ("megatron", "fsdp_config", "veomni", "torchtitan", "engine")
"""Sections of training backends; `engine` is Megatron Lite's."""
POLICY = TrainedModel(
    "actor", ACTOR, tuple(f"{ACTOR}.{name}" for name in BACKENDS), f"{ACTOR}.optim", "actor_rollout_ref.model"
)
VALUE_MODEL = TrainedModel(
    "critic",
    CRITIC,
    (*(f"{CRITIC}.{name}" for name in (*BACKENDS, "fsdp")), f"{CRITIC}.model.fsdp_config"),
    f"{CRITIC}.optim",
    f"{CRITIC}.model",
)


def translate_ranks(run: VerlRun, model: TrainedModel) -> None:
    """Translate layout, recomputation, optimizer and offloading of a model."""
    if run.uses_megatron:
        _translate_megatron(run, model)
    else:
        _translate_sharding(run, model)
    _translate_optimizer(run, model)
    _translate_offload(run, model)


def translate_budget(run: VerlRun, model: TrainedModel, *, tokens: str, micro: tuple[str, ...], dynamic: str) -> None:
    """Translate micro-batches to a token budget. `tokens`, `micro`, `dynamic`: verl's token budget, responses per
    micro-batch, and flag that selects between them."""
    source, draft = run.source, run.draft
    key = f"{model.section}.tokens_per_microbatch"
    ranks = _sequence_ranks(run, model)
    responses = _responses(run, model, micro)
    if source.flag(dynamic):
        origin: tuple[str, ...] = (tokens,)
        budget = source.integer(tokens) * ranks
        note = f"x {ranks} ranks that share a sequence" if ranks > 1 else ""
        text = f"{source.effective(tokens).shown} tokens per GPU"
    else:
        origin, budget = micro, responses * run.longest
        note = f"x {run.longest} tokens of the longest sequence"
        given = source.effective(*micro)
        place = "on all GPUs together" if given.key == micro[-1] != micro[0] else "per GPU"
        text = f"{given.shown} responses {place}" if given.value else f"{micro[0]} is not set"
    if budget < run.longest:
        note, budget = f"raised from {budget} to one longest sequence", run.longest
    step = 2 * ranks if ranks > 1 else 1
    budget = -(-budget // step) * step
    draft.take(source, key, budget, *origin, note=note)
    draft.changes.append(
        f"{text}: {key}={budget} is the maximum number of tokens of a packed row, which the ranks of "
        "a context-parallel group share; the number of responses in it varies"
    )
    source.find(tokens, *micro)


def _responses(run: VerlRun, model: TrainedModel, micro: tuple[str, ...]) -> int:
    """Return the responses of a micro-batch on one GPU. The older key, the last of `micro`, counts all GPUs."""
    value = run.source.integer(*micro)
    if run.source.is_set(micro[-1]) and not run.source.is_set(micro[0]):
        sizes = [run.draft.integer(f"{model.section}.parallel.{name}") for name in ("tp", "pp", "cp")]
        value //= max(run.trainer_gpus // math.prod(max(size, 1) for size in sizes), 1)
    return max(value, 1)


def _sequence_ranks(run: VerlRun, model: TrainedModel) -> int:
    """Return the number of ranks that share a sequence in verl."""
    source = run.source
    names = (*model.keys("context_parallel_size"), *model.keys("cp"))
    keys = names if run.uses_megatron else _ulysses(model)
    return max(source.integer(*keys), 1)


def _ulysses(model: TrainedModel) -> tuple[str, ...]:
    name = "ulysses_sequence_parallel_size"
    others = ("ulysses_parallel_size", "turbo_config.distributed.ulysses_parallel_size", "context_parallel_size")
    return (f"{model.role}.{name}", *model.keys(name), name, *(k for n in (*others, "cp_size") for k in model.keys(n)))


def _translate_megatron(run: VerlRun, model: TrainedModel) -> None:
    source, draft, section = run.source, run.draft, f"{model.section}.parallel"
    # Megatron Lite has the names tp, pp, cp, ep, etp.
    names = {ours: (*model.keys(theirs), *model.keys(ours)) for ours, theirs in SIZES.items()}
    draft.apply(source, [Row(f"{section}.{ours}", keys) for ours, keys in names.items()])
    draft.apply(source, [Row(f"{section}.{ours}", model.transformer(theirs)) for ours, theirs in LAYER_NAMES.items()])
    vpp = (*model.keys("virtual_pipeline_model_parallel_size"), *model.keys("vpp"))
    draft.apply(source, [Row(f"{section}.vpp", vpp, lambda chunks: SKIP if chunks == 1 else chunks)])
    tp, ep = draft.integer(f"{section}.tp"), draft.integer(f"{section}.ep")
    if ep > 1 and tp > 1 and f"{section}.etp" not in draft.values:
        draft.take(source, f"{section}.etp", tp, *model.keys("expert_tensor_parallel_size"), note="Megatron's is tp")
    if not _flag_or(run, model.keys("sequence_parallel"), default=True) and tp > 1:
        draft.take(source, f"{section}.sequence_parallel", False, *model.keys("sequence_parallel"))
    if not _flag_or(run, model.keys("use_distributed_optimizer"), default=True):
        draft.take(source, f"{model.section}.distributed_optimizer", False, *model.keys("use_distributed_optimizer"))
    rows = [
        *(Row(f"{model.section}.{name}", model.keys(f"override_ddp_config.{name}")) for name in OVERLAPS),
        Row(f"{model.section}.recompute", model.transformer("recompute_granularity")),
        Row(f"{model.section}.recompute_layers", model.transformer("recompute_num_layers")),
        *(
            Row(f"{model.section}.moe.{ours}", model.transformer(theirs), _BALANCE.get(ours))
            for ours, theirs in MOE.items()
        ),
        Row(f"{model.section}.mtp_loss_coefficient", (f"{model.model}.mtp.mtp_loss_scaling_factor",), _mtp(run, model)),
    ]
    draft.apply(source, rows)
    if source.text(*model.transformer("fp8")) is not None:
        draft.apply(source, [Row(f"{model.section}.fp8", model.transformer("fp8_recipe"))])
    modules = source.find(*model.transformer("recompute_modules"))
    if draft.values.get(f"{model.section}.recompute") == "selective" and modules is not None:
        draft.set(f"{model.section}.recompute_modules", modules.value, modules.origin)
    elif draft.values.get(f"{model.section}.recompute") != "full":
        draft.drop(f"{model.section}.recompute_layers")
    _translate_dispatcher(run, model)


OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")
_BALANCE: dict[str, Callable[[object], object]] = {"load_balancing": lambda value: BALANCING.get(str(value))}


def _mtp(run: VerlRun, model: TrainedModel) -> Callable[[object], object]:
    trained = run.source.flag(f"{model.model}.mtp.enable") and run.source.flag(f"{model.model}.mtp.enable_train")
    return lambda value: value if trained else SKIP


def _translate_dispatcher(run: VerlRun, model: TrainedModel) -> None:
    source, draft = run.source, run.draft
    keys = model.transformer("moe_token_dispatcher_type")
    name, deepep = source.text(*keys), source.flag(*model.transformer("moe_enable_deepep"))
    if name in ("alltoall", "allgather"):
        draft.take(source, f"{model.section}.moe.dispatcher", name, *keys)
    elif name == "flex" or deepep:
        draft.take(source, f"{model.section}.moe.dispatcher", "deepep", *keys, *model.transformer("moe_enable_deepep"))


def _translate_sharding(run: VerlRun, model: TrainedModel) -> None:
    """Translate FSDP and similar backends. Sequence ranks become tensor-parallel ranks."""
    source, draft, section = run.source, run.draft, f"{model.section}.parallel"
    ranks, tp_keys = _sequence_ranks(run, model), (*model.keys("tensor_parallel_size"), *model.keys("tp_size"))
    tp = max(source.integer(*tp_keys), 1)
    if tp > 1:
        draft.take(source, f"{section}.tp", tp * ranks, *tp_keys, note=f"x {ranks}" if ranks > 1 else "")
    elif ranks > 1:
        draft.take(source, f"{section}.tp", ranks, *_ulysses(model), note="Ulysses ranks")
    expert_names = ("expert_parallel_size", "ep_size", "turbo_config.distributed.expert_parallel_size")
    ep_keys = tuple(key for name in expert_names for key in model.keys(name))
    if source.integer(*ep_keys) > 1:
        draft.take(source, f"{section}.ep", source.integer(*ep_keys), *ep_keys)
        draft.set(f"{section}.etp", 1, f"{source.effective(*ep_keys).key}: experts are not split")
    pp_keys = (*model.keys("pipeline_parallel_size"), *model.keys("pp_size"))
    if source.integer(*pp_keys) > 1:
        draft.take(source, f"{section}.pp", source.integer(*pp_keys), *pp_keys)
    if _shards_over_all(run, model):
        _translate_fsdp(run, model)
    elif model is POLICY:
        draft.changes.append(
            f"{ACTOR}.strategy={source.text(f'{ACTOR}.strategy') or 'fsdp'} shards weights, gradients and optimizer "
            "state; here Megatron shards the optimizer state, and actor.parallel the rest. "
            "`mcore-rl plan CONFIG.yaml --suggest` searches for a layout"
        )
    checkpointing = f"{model.model}.enable_gradient_checkpointing"
    if _flag_or(run, (checkpointing,), default=True):
        note = "" if source.is_set(checkpointing) else "verl's default"
        draft.set(f"{model.section}.recompute", "full", source.effective(checkpointing).origin + (note and f": {note}"))


def _shards_over_all(run: VerlRun, model: TrainedModel) -> bool:
    """Return whether FSDP shards a model over all GPUs, so that shard_parameters is its counterpart."""
    if not run.uses_fsdp or run.draft.integer(f"{model.section}.parallel.pp") > 1:
        return False
    size = run.source.integer(*model.keys("fsdp_size"))
    if 0 < size < run.trainer_gpus:
        shown = run.source.effective(*model.keys("fsdp_size")).shown
        run.draft.changes.append(
            f"{shown} shards over {size} GPUs and replicates the shards: no counterpart; "
            f"{model.section}.parallel.shard_parameters=true shards over all data-parallel ranks"
        )
        return False
    return True


def _translate_fsdp(run: VerlRun, model: TrainedModel) -> None:
    """Translate FSDP over all GPUs, and list its options that have another meaning here."""
    source, draft = run.source, run.draft
    key = f"{model.section}.parallel.shard_parameters"
    draft.take(source, key, True, f"{model.role}.strategy", note="FSDP shards weights, gradients and optimizer state")
    if source.is_set(*model.keys("reshard_after_forward")) and not source.flag(*model.keys("reshard_after_forward")):
        shown = source.effective(*model.keys("reshard_after_forward")).shown
        draft.changes.append(f"{shown}: {key} frees a layer's gathered weights after its forward pass")
    if source.flag(*model.keys("offload_policy")):
        shown = source.effective(*model.keys("offload_policy")).shown
        draft.changes.append(
            f"{shown} keeps shards in host memory during passes; {model.section}.offload only does so between phases"
        )


def _translate_optimizer(run: VerlRun, model: TrainedModel) -> None:
    source, draft, theirs, ours = run.source, run.draft, model.optimizer, f"{model.section}.optimizer"
    draft.apply(
        source, [Row(f"{ours}.lr", (f"{theirs}.lr",)), Row(f"{ours}.weight_decay", (f"{theirs}.weight_decay",))]
    )
    betas = source.effective(f"{theirs}.betas").value
    if isinstance(betas, list | tuple) and len(betas) == 2:
        for name, value in zip(("beta1", "beta2"), betas, strict=True):
            draft.take(source, f"{ours}.{name}", value, f"{theirs}.betas")
    # FSDP's key in older versions.
    draft.apply(source, [Row(f"{ours}.clip_grad", (f"{model.role}.grad_clip", f"{theirs}.clip_grad"))])
    offload = (f"{theirs}.override_optimizer_config.optimizer_cpu_offload",)
    if source.flag(*offload):
        draft.take(source, f"{ours}.cpu_offload", True, *offload)
    optimizer = source.text(f"{theirs}.optimizer")
    if optimizer is not None and optimizer.lower() not in ("adam", "adamw"):
        draft.block(source.effective(f"{theirs}.optimizer"), "the optimizer is Adam with decoupled weight decay")


def _translate_offload(run: VerlRun, model: TrainedModel) -> None:
    source, draft, ours = run.source, run.draft, f"{model.section}.offload"
    if run.is_fully_asynchronous or run.is_one_step_off:
        source.find(*(key for part in ("param", "grad", "optimizer") for key in model.keys(f"{part}_offload")))
        return
    sharded = bool(draft.values.get(f"{model.section}.parallel.shard_parameters"))
    for part, theirs in (("params", "param"), ("grads", "grad"), ("optimizer", "optimizer")):
        # Gradients of sharded parameters have no memory between updates.
        if sharded and part == "grads":
            source.find(*model.keys(f"{theirs}_offload"))
        elif source.flag(*model.keys(f"{theirs}_offload")):
            draft.take(source, f"{ours}.{part}", True, *model.keys(f"{theirs}_offload"))
    if not run.uses_megatron and not sharded and draft.values.get("cluster.device") == "cuda":
        for part in ("params", "grads", "optimizer"):
            if f"{ours}.{part}" not in draft.values:
                draft.set(
                    f"{ours}.{part}",
                    True,
                    "FSDP shards it over all GPUs; here it is in host memory while it is not used",
                )
    if draft.values.get(f"{model.section}.optimizer.cpu_offload"):
        draft.drop(f"{ours}.optimizer")


def _flag_or(run: VerlRun, keys: tuple[str, ...], *, default: bool) -> bool:
    return run.source.flag(*keys) if run.source.is_set(*keys) else default
