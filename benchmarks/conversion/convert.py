"""Conversion of a 400M Qwen3-MoE in bfloat16 between HF files in memory and megatron-core tensors. Limits: safetensors
reads the same bytes into preallocated memory, and one memcpy copies them.

Both sides of a row alternate in one process; the row is the median of their ratios. The increase of peak memory is
measured in a separate process. It includes pages of mapped files, as the kernel counts them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from benchmarks.pairs import Pair, pair_row
from benchmarks.result import Result
from benchmarks.sizes import size
from mcore_rl.types.json import JsonObject
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.messages import views
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.tensor_parts import part_of
from mcore_rl.weights.transports.hosts import this_host
from mcore_rl.weights.transports.segments import SharedSegment
from mcore_rl.weights.transports.topology import Endpoint, Topology
from model_converters.families import family_for
from model_converters.hf.io import HFCheckpoint, HFWriter
from model_converters.hf.loader import load_tensors
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.plan import TensorLoad, export_plan, load_plan, local_shapes
from model_converters.mapping.table import BoundRow, bind

MEMORY = Path("/dev/shm")
BUCKET_BYTES = 256 * 2**20
CONFIG: JsonObject = {
    "model_type": "qwen3_moe",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 3072,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rope_theta": 10_000.0,
    "torch_dtype": "bfloat16",
}
CONFIG |= size(
    {},
    {
        "vocab_size": 512,
        "hidden_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": 32,
        "intermediate_size": 128,
        "num_experts": 4,
        "moe_intermediate_size": 32,
    },
)
Tensors = dict[str, torch.Tensor]


def run() -> list[Result]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix=f"mcore_rl_convert_{os.getpid()}_", dir=MEMORY) as directory:
        source = Path(directory) / "hf"
        write_source(source)
        return [
            pair_row("HF -> mcore", ">= 0.7", load_pair, source, 1),
            pair_row("HF -> mcore, one of 2 tp ranks", "", load_pair, source, 2),
            pair_row("mcore -> HF bucket", ">= 0.7", bucket_pair, 1),
        ]


def bound_rows() -> list[BoundRow]:
    return bind(family_for(CONFIG).rows(CONFIG), CONFIG, torch.bfloat16)


def write_source(directory: Path) -> None:
    """Write an HF directory with random weights in four shards."""
    plans = export_plan(bound_rows(), TrainLayout(1))
    num_bytes = sum(torch.Size(plan.shape).numel() * plan.dtype.itemsize for plan in plans)
    with HFWriter(directory, num_bytes // 4) as writer:
        writer.begin(plans)
        for plan in plans:
            for piece in plan.pieces:
                writer.write(plan, piece, torch.randn(plan.piece_shape(piece)).to(plan.dtype))
        writer.finish(config=CONFIG)


def load_pair(source: Path, tp: int) -> Pair:
    """Compare our read of rank 0's slices with safetensors reading the same slices into the same kind of memory."""
    bound, layout = bound_rows(), TrainLayout(tp, tp=tp)
    shapes = local_shapes(bound, layout, 0)
    # Written once, so that the pages exist before the first timed round.
    local = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    wanted = _stretches(load_plan(bound, layout, 0))
    apart = {name: torch.ones(shape, dtype=torch.bfloat16) for name, (shape, *_) in wanted.items()}

    def ours() -> None:
        with HFCheckpoint(source) as checkpoint:
            load_tensors(checkpoint, bound, layout, 0, local)

    def safetensors() -> None:
        # What any loader has to do at least: read each tensor, or its slice, once.
        for file in sorted(source.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if tp == 1:
                        apart[name].copy_(opened.get_tensor(name))
                    else:
                        _, dim, rows = wanted[name]
                        part = opened.get_slice(name)
                        apart[name].copy_(part[rows] if dim == 0 else part[:, rows])

    return Pair(ours, safetensors, sum(tensor.nbytes for tensor in local.values()), local)


def _stretches(loads: Sequence[TensorLoad]) -> dict[str, tuple[tuple[int, ...], int, slice]]:
    """Return shape, dimension and range of each HF tensor that the rank needs."""
    found: dict[str, tuple[tuple[int, ...], int, slice]] = {}
    for load in loads:
        for name, piece in load.sources:
            # One range per tensor: a rank's pieces of a tensor are adjacent.
            known = found[name][2] if name in found else slice(piece.start, piece.start)
            rows = slice(min(known.start, piece.start), max(known.stop, piece.start + piece.length))
            shape = list(load.bound.row.shapes[piece.part])
            shape[piece.dim] = rows.stop - rows.start
            found[name] = tuple(shape), piece.dim, rows
    return found


def bucket_pair(tp: int) -> Pair:
    """Compare packing of all weights into two shared-memory slots with one memcpy, for an engine of one rank."""
    bound, layout, here = bound_rows(), TrainLayout(tp, tp=tp), Endpoint(this_host(), "127.0.0.1")
    local = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in local_shapes(bound, layout, 0).items()}
    topology = Topology((here,) * tp, (here,), 1)
    plan = SyncPlan(CONFIG, torch.bfloat16, layout, EngineLayout(), topology, BUCKET_BYTES, 2)
    outgoing = plan.outgoing(0)
    slot_bytes = max(message.num_bytes for (message,) in outgoing.values())
    segment = SharedSegment.create(2 * slot_bytes)
    segment.unlink()  # the mapping stays valid, and nothing is left if this process is killed
    # Rounds alternate between two slots, as in a sync.
    places = [
        pair
        for sync_round, (message,) in outgoing.items()
        for pair in views(message, segment.memory[sync_round % 2 * slot_bytes :][: message.num_bytes])
    ]
    num_bytes = sum(tensor.nbytes for tensor in local.values())
    # One copy of as many contiguous bytes, between pages that exist.
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)

    def ours() -> None:
        for each, (place,) in places:
            place.copy_(part_of(each, local, each.shape))

    return Pair(ours, lambda: target.copy_(source), num_bytes)
