"""Devices of a verl run: nodes, engines, and asynchronous training on separate devices."""

from __future__ import annotations

import math

from mcore_rl.migration.verl.defaults import ROLLOUT
from mcore_rl.migration.verl.run import VerlRun

DEVICES = {"cuda": "cuda", "cpu": "cpu"}
MAX_SHARED_GPUS = 8
"""Trainer and engines of a node count as sharing it if they have at most this many GPUs together."""
NODES, GPUS = ("trainer.nnodes", "rollout.nnodes"), ("trainer.n_gpus_per_node", "rollout.n_gpus_per_node")


def translate_cluster(run: VerlRun) -> None:
    """Translate nodes, engines and placement."""
    source, draft = run.source, run.draft
    device = source.text("trainer.device") or "cuda"
    if device not in DEVICES:
        draft.changes.append(f"trainer.device={device}: this project runs on CUDA GPUs and on CPUs")
    draft.set("cluster.device", DEVICES.get(device, "cuda"), source.effective("trainer.device").origin)
    if run.is_fully_asynchronous or run.is_one_step_off:
        _translate_separate(run)
        _translate_staleness(run)
        return
    draft.take(source, "cluster.nodes", source.integer(NODES[0]), NODES[0])
    draft.take(source, "cluster.gpus_per_node", source.integer(GPUS[0]), GPUS[0])
    _set_engines(run, run.trainer_gpus)
    mode = source.text("trainer.v1.trainer_mode")
    if mode not in (None, "sync"):
        draft.block(
            source.effective("trainer.v1.trainer_mode"),
            "asynchronous modes of this trainer differ; set rollout.max_staleness and cluster.placement "
            "(docs/async.md)",
        )


def _set_engines(run: VerlRun, gpus: int) -> None:
    """Set tp and the number of engines on `gpus` devices."""
    source, draft = run.source, run.draft
    key, tp = f"{ROLLOUT}.tensor_model_parallel_size", run.engine_gpus
    other = tp // max(source.integer(key), 1)
    draft.take(source, "rollout.tp", tp, key, note=f"x {other} other ranks of the engine" if other > 1 else "")
    if gpus % tp or gpus < tp:
        draft.choices.append(f"rollout.num_engines: rollout.tp={tp} does not divide the {gpus} GPUs; set both")
        return
    draft.set("rollout.num_engines", gpus // tp, f"{gpus} GPUs / {tp} per engine")


def _translate_separate(run: VerlRun) -> None:
    """Translate engines on devices of their own: whole nodes, or a part of every node."""
    source, draft = run.source, run.draft
    nodes, engine_nodes = (source.integer(key) for key in NODES)
    gpus, engine_gpus = (source.integer(key) for key in GPUS)
    draft.set("cluster.placement", "disaggregated", "rollout.nnodes: engines have devices of their own")
    if nodes == engine_nodes and gpus + engine_gpus <= MAX_SHARED_GPUS:
        draft.take(source, "cluster.nodes", nodes, *NODES)
        note = f"+ {GPUS[1]}={engine_gpus}"
        draft.take(source, "cluster.gpus_per_node", gpus + engine_gpus, GPUS[0], note=note)
        draft.set("actor.num_ranks", nodes * gpus, f"{NODES[0]} x {GPUS[0]}")
        if draft.values.get("algorithm.advantage") == "gae":
            draft.set("critic.num_ranks", nodes * gpus, f"{NODES[0]} x {GPUS[0]}")
    elif gpus == engine_gpus:
        draft.take(source, "cluster.nodes", nodes + engine_nodes, NODES[0], note=f"+ {NODES[1]}={engine_nodes}")
        draft.take(source, "cluster.gpus_per_node", gpus, GPUS[0])
        draft.take(source, "rollout.nodes", engine_nodes, NODES[1])
    else:
        draft.block(
            source.effective(GPUS[1]),
            f"all nodes have the same number of GPUs here, but trainer nodes have {gpus}; set cluster.nodes, "
            "cluster.gpus_per_node and rollout.nodes",
        )
    source.find(*NODES, *GPUS)
    _set_engines(run, engine_nodes * engine_gpus)


def _translate_staleness(run: VerlRun) -> None:
    source, draft = run.source, run.draft
    if run.is_one_step_off:
        draft.set("rollout.max_staleness", 1, "one_step_off_policy")
        draft.set("rollout.max_staleness_hard", 1, "one_step_off_policy")
        draft.set("rollout.swap", "finish", "one_step_off_policy: responses finish before the weights change")
        return
    keys = tuple(f"async_training.{name}" for name in ("staleness_threshold", "partial_rollout"))
    threshold = source.number(keys[0])
    staleness = math.ceil(threshold)
    source.find(*keys)
    if staleness:
        draft.take(source, "rollout.max_staleness", staleness, keys[0], note=f"{threshold:g} rounded up")
        swap = "recompute" if source.flag(keys[1]) else "finish"
        if swap != "keep":
            draft.take(source, "rollout.swap", swap, keys[1])
        draft.changes.append(
            f"{source.effective(keys[0]).shown} bounds the share of stale samples per weight sync; "
            f"rollout.max_staleness={staleness} bounds the mean age of groups in weight versions, and a version is "
            f"published after trainer.prompts_per_step={run.prompts_per_step} prompts"
        )
