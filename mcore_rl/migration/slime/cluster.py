"""Devices of a slime run: nodes, engines, colocated or separate."""

from __future__ import annotations

from mcore_rl.migration.slime.run import SlimeRun

WEIGHT_MODE, WEIGHT_TRANSPORT = "update-weight-mode", "update-weight-transport"
WEIGHT_DIRECTORY = "update-weight-disk-dir"
NODES, GPUS, ENGINE_GPUS = "actor-num-nodes", "actor-num-gpus-per-node", "rollout-num-gpus"


def translate_cluster(run: SlimeRun) -> None:
    """Translate nodes, engines, placement and asynchronous training."""
    source, draft = run.source, run.draft
    draft.set("cluster.device", "cuda", "slime runs on GPUs")
    nodes, gpus = max(source.integer(NODES), 1), max(source.integer(GPUS), 1)
    separate = not source.flag("colocate") and not run.is_supervised
    if not separate:
        draft.take(source, "cluster.nodes", nodes, NODES)
        draft.take(source, "cluster.gpus_per_node", gpus, GPUS)
        if not run.is_supervised:
            _set_engines(run, nodes * gpus)
    else:
        _translate_separate(run, nodes, gpus)
    if run.is_asynchronous and separate:
        _translate_staleness(run)
    source.find("colocate", ENGINE_GPUS, "rollout-num-gpus-per-engine", "num-gpus-per-node", "partial-rollout")


def _set_engines(run: SlimeRun, gpus: int) -> None:
    source, draft = run.source, run.draft
    tp = max(source.integer("rollout-num-gpus-per-engine"), 1)
    draft.take(source, "rollout.tp", tp, "rollout-num-gpus-per-engine")
    if gpus % tp or not gpus:
        draft.choices.append(f"rollout.num_engines: engines of {tp} GPUs do not divide the {gpus} GPUs; set both")
    else:
        draft.set("rollout.num_engines", gpus // tp, f"{gpus} GPUs / {tp} per engine")
    data_parallel = source.integer("sglang-dp-size")
    if data_parallel > 1:
        draft.changes.append(
            f"--sglang-dp-size={data_parallel}: attention is not data-parallel inside an engine here; compare the "
            "plan's memory with smaller engines"
        )


def _translate_separate(run: SlimeRun, nodes: int, gpus: int) -> None:
    """Translate engines on devices of their own: a part of one node, or whole nodes."""
    source, draft = run.source, run.draft
    engine_gpus = source.integer(ENGINE_GPUS)
    per_node = max(source.integer("num-gpus-per-node"), 1)
    draft.set("cluster.placement", "disaggregated", "slime without --colocate")
    if engine_gpus <= 0:
        source.problems.append("--rollout-num-gpus is not set, and --colocate neither: the engines have no GPUs")
        return
    if nodes == 1 and gpus + engine_gpus <= per_node:
        draft.take(source, "cluster.nodes", 1, NODES)
        draft.take(source, "cluster.gpus_per_node", gpus + engine_gpus, GPUS, note=f"+ --{ENGINE_GPUS}={engine_gpus}")
        draft.set("actor.num_ranks", gpus, source.effective(GPUS).origin)
    elif gpus == per_node and engine_gpus % per_node == 0:
        draft.take(
            source, "cluster.nodes", nodes + engine_gpus // per_node, NODES, note=f"+ --{ENGINE_GPUS}={engine_gpus}"
        )
        draft.take(source, "cluster.gpus_per_node", gpus, GPUS)
        draft.take(source, "rollout.nodes", engine_gpus // per_node, ENGINE_GPUS, note=f"/ {per_node} per node")
    else:
        draft.block(
            source.effective(ENGINE_GPUS),
            f"engines use whole nodes of {per_node} GPUs, or a part of one node; set cluster.nodes, "
            "cluster.gpus_per_node and rollout.nodes",
        )
    _set_engines(run, engine_gpus)
    _translate_weights(run)


def _translate_weights(run: SlimeRun) -> None:
    """Translate weight updates through files, and differences."""
    draft, source = run.draft, run.source
    transport, directory = source.find(WEIGHT_TRANSPORT), source.find(WEIGHT_DIRECTORY)
    through_files = transport is not None and transport.value == "disk" and directory is not None
    if directory is not None and through_files:
        draft.take(source, "weights.transport", "files", WEIGHT_TRANSPORT)
        draft.take(source, "weights.directory", directory.value, WEIGHT_DIRECTORY)
    mode, nodes = source.find(WEIGHT_MODE), draft.values.get("cluster.nodes")
    if mode is None or mode.value != "delta":
        return
    if through_files or (isinstance(nodes, int) and nodes > 1):
        draft.take(source, "weights.delta", True, WEIGHT_MODE)
        if not through_files:
            draft.changes.append(f"{mode.shown}: differences are sent over the network, not as files in a directory")


def _translate_staleness(run: SlimeRun) -> None:
    draft, source = run.draft, run.source
    draft.set("rollout.max_staleness", 1, "train_async.py generates the next batch during an update")
    if run.is_fully_asynchronous:
        draft.set("rollout.swap", "recompute", "fully_async_rollout continues responses with new weights")
        draft.changes.append(
            "fully_async_rollout has no limit of staleness; rollout.max_staleness=1 bounds the mean age of groups, and "
            "rollout.max_staleness_hard the age of each"
        )
    else:
        draft.set("rollout.max_staleness_hard", 1, "train_async.py is one step off")
        draft.set("rollout.swap", "finish", "train_async.py waits for the running batch before it updates weights")
    interval = source.integer("update-weights-interval")
    if interval > 1:
        draft.block(source.effective("update-weights-interval"), "weights are published after every step")
