"""Memory of Megatron's buffers, computed by hand."""

from __future__ import annotations

import numpy as np

from mcore_rl.config.models import ActorConfig, OffloadConfig
from mcore_rl.megatron.optim.host_optimizer import PIECE_ELEMENTS
from mcore_rl.planner.layers.execution import Execution
from mcore_rl.planner.stages import rank_states
from mcore_rl.planner.state import StageParameter, lay_out, stage_state
from model_converters.mapping.layout import TrainLayout


def test_parameters_start_aligned_and_the_buffer_ends_so() -> None:
    buffer = lay_out([StageParameter(100), StageParameter(65)], 3, None, aligned=True)
    # The last parameter comes first; 128 + 100 rounds up to a multiple of lcm(3, 128).
    assert buffer.starts.tolist() == [0, 128]
    assert buffer.ends.tolist() == [65, 228]
    assert buffer.buckets == ((0, 384),)


def test_every_element_has_one_owner() -> None:
    generator = np.random.default_rng(0)
    held = [StageParameter(int(size)) for size in generator.integers(1, 900, 40)]
    for bucket in (None, 2_000):
        buffer = lay_out(held, 6, bucket, aligned=True)
        elements, parameters, largest = buffer.owned(6)
        assert elements.sum() == sum(parameter.elements for parameter in held)
        assert parameters.sum() >= len(held)
        assert (elements <= buffer.elements // 6).all()
        assert (largest <= elements).all()
        # The largest parameter is in one range, or fills a range up to the start of the next.
        assert max(largest) >= max(parameter.elements for parameter in held) / 2


def test_a_tied_embedding_has_a_bucket_of_its_own() -> None:
    held = [StageParameter(500, own_bucket=True), StageParameter(100)]
    assert len(lay_out(held, 2, None, aligned=True).buckets) == 2
    assert len(lay_out(held, 2, None, aligned=False).buckets) == 1


def run_of(actor: ActorConfig, layout: TrainLayout) -> Execution:
    return Execution(actor, layout, 2, fused=True, cuda=True, imbalance=1.0, square_length=0)


def test_bytes_with_and_without_the_distributed_optimizer() -> None:
    chunk = [StageParameter(1024), StageParameter(512, expert=True)]
    layout = TrainLayout(4, ep=2)
    actor = ActorConfig()
    (state, *_) = stage_state([chunk], 0, run_of(actor, layout))
    assert (state.parameters, state.weights_bytes, state.gradients_bytes) == (1536, 3072, 6144)
    assert state.optimizer_bytes == 12 * (1024 // 4 + 512 // 2)
    # Each rank writes the weights and the state of its part into a checkpoint, whoever holds copies of them.
    assert state.checkpoint_bytes == 14 * (1024 // 4 + 512 // 2)
    actor.distributed_optimizer = False
    whole = stage_state([chunk], 0, run_of(actor, layout))[0]
    assert whole.optimizer_bytes == 12 * 1536
    assert whole.checkpoint_bytes == state.checkpoint_bytes


def test_an_optimizer_on_the_host_leaves_six_bytes_per_parameter() -> None:
    actor = ActorConfig()
    actor.optimizer.cpu_offload = True
    (state,) = stage_state([[StageParameter(1024)]], 0, run_of(actor, TrainLayout(1)))
    assert (state.total_bytes, state.host_bytes, state.checkpoint_bytes) == (6 * 1024, 12 * 1024, 14 * 1024)
    # One whole piece, although the state is smaller.
    assert state.piece_bytes == 12 * PIECE_ELEMENTS


def test_sharded_state_counts_rows_of_the_last_rank() -> None:
    """Four dense and two expert data-parallel ranks; rows by the rule of torch.chunk, memory of the largest shard."""
    chunk = [
        StageParameter(40, rows=10, layer="a"),  # rows 3, 3, 3, 1
        StageParameter(24, rows=3, layer="a", expert=True),  # rows 2, 1
        StageParameter(6, rows=6),  # rows 2, 2, 2, 0
    ]
    state = rank_states([chunk], 0, run_of(ActorConfig(), TrainLayout(4, ep=2, shard_parameters=True)))[3]
    assert state.parameters == 4 + 8
    assert (state.weights_bytes, state.gradients_bytes, state.reference_bytes) == (4 * 30, 4 * 30, 2 * 30)
    assert state.optimizer_bytes == 8 * (4 + 8)
    # Gradients have no memory between updates.
    assert state.kept_bytes(OffloadConfig()) == state.optimizer_bytes
    assert state.gathered_forward_bytes == 2 * (6 + 3 * 64)
    assert state.gathered_update_bytes == state.gathered_forward_bytes + 2 * 6 + (2 + 8) * 64
