from __future__ import annotations

import pytest

from model_converters.errors import LayoutError
from model_converters.mapping.layout import TrainLayout


def test_stage_layers_assigns_chunks_round_robin():
    """The example in Megatron's source: 8 layers, 2 stages, 2 virtual chunks."""
    assert TrainLayout(2, pp=2, vpp=2).stage_layers(8) == [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]


def test_stage_layers_uneven_first_and_last_stage():
    stages = TrainLayout(4, pp=4, first_stage_layers=3, last_stage_layers=2).stage_layers(21)
    assert stages == [[range(3)], [range(3, 11)], [range(11, 19)], [range(19, 21)]]


@pytest.mark.parametrize("sizes", [{"tp": 2, "cp": 2, "pp": 2, "ep": 2, "etp": 2}, {"tp": 4, "ep": 8, "pp": 2}])
def test_holders_are_ranks_with_matching_coordinates(sizes):
    layout = TrainLayout(32, **sizes)
    where = [layout.coordinates(rank) for rank in range(32)]
    assert len(set(where)) == 32
    for stage in range(layout.pp):
        for shard in range(layout.tp):
            wanted = [rank for rank, at in enumerate(where) if (at.pp, at.tp) == (stage, shard)]
            assert list(layout.dense_holders(stage, shard)) == wanted
        assert list(layout.dense_holders(stage, None)) == [r for r, at in enumerate(where) if at.pp == stage]
        for ep in range(layout.ep):
            for shard in range(layout.etp):
                wanted = [rank for rank, at in enumerate(where) if (at.pp, at.ep, at.etp) == (stage, ep, shard)]
                assert list(layout.expert_holders(stage, ep, shard)) == wanted


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world_size": 6, "tp": 4}, "world size 6 is not a multiple of tp 4"),
        ({"world_size": 8, "tp": 2, "pp": 2, "cp": 4}, "world size 8 is not a multiple of tp 2 x pp 2 x cp 4 = 16"),
        ({"world_size": 8, "ep": 8, "etp": 2}, "world size 8 is not a multiple of etp 2 x ep 8"),
        ({"world_size": 4, "ep": 0}, "ep is 0"),
        ({"world_size": 4, "vpp": 2}, "set pp > 1"),
        ({"world_size": 4, "first_stage_layers": 2}, "set pp > 1"),
        ({"world_size": 2, "pp": 2, "first_stage_layers": 0}, "first_stage_layers is 0; it must be at least 1"),
        ({"world_size": 2, "pp": 2, "last_stage_layers": -1}, "last_stage_layers is -1; it must be at least 1"),
        ({"world_size": 4, "pipeline_layout": "EttL"}, "pipeline_layout needs more than one pipeline stage"),
        ({"world_size": 2, "pp": 2, "pipeline_layout": "Ett|t|tL"}, "3 stages, which pp 2 does not divide"),
        ({"world_size": 2, "pp": 2, "vpp": 3, "pipeline_layout": "Et|t|t|tL"}, "2 for each of pp 2, but vpp is 3"),
        ({"world_size": 2, "pp": 2, "first_stage_layers": 1, "pipeline_layout": "Et|tL"}, "replaces first_stage"),
        ({"world_size": 2, "pp": 2, "pipeline_layout": "|EttL"}, "first stage must begin with E"),
        ({"world_size": 2, "pp": 2, "pipeline_layout": "Et|EtL"}, "E, and no other stage may contain it"),
        ({"world_size": 3, "pp": 3, "pipeline_layout": "Ett||L"}, "every stage must contain a layer"),
        ({"world_size": 2, "pp": 2, "pipeline_layout": "tE|tL"}, "first stage must begin with E"),
        ({"world_size": 2, "pp": 2, "pipeline_layout": "EtL|t"}, "last stage must end with L"),
        ({"world_size": 2, "pp": 2, "pipeline_layout": "Ettm|L"}, "m must be on the last stage"),
        ({"world_size": 2, "pp": 2, "pipeline_layout": "Et|mtL"}, "every t must come before m"),
        ({"world_size": 2, "pp": 2, "pipeline_layout": "Et | tL"}, "which contains ' '"),
        ({"world_size": 2, "pp": 2, "pipeline_layout": "E(t)*99999999|L"}, "repeats more than"),
    ],
)
def test_layout_sizes_that_do_not_fit_are_rejected(sizes, message):
    with pytest.raises(LayoutError, match=message) as caught:
        TrainLayout(**sizes)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("sizes", "layers", "message"),
    [
        ({"pp": 4}, 6, "set first_stage_layers or last_stage_layers"),
        ({"pp": 2, "vpp": 2}, 6, "vpp 2 does not divide the 3 layers of pipeline stage 0"),
        ({"pp": 2, "first_stage_layers": 2, "last_stage_layers": 3}, 6, "do not fit the 6 layers"),
        ({"pp": 4, "first_stage_layers": 7}, 6, "do not fit the 6 layers"),
    ],
)
def test_stage_layers_indivisible_are_rejected(sizes, layers, message):
    with pytest.raises(LayoutError, match=message):
        TrainLayout(4, **sizes).stage_layers(layers)


def test_pipeline_layout_fixes_chunks_and_vpp():
    layout = TrainLayout(2, pp=2, pipeline_layout="E|(tt|)*2tL")
    assert layout.vpp == 2
    assert layout.stage_layers(5) == [[range(0), range(2, 4)], [range(2), range(4, 5)]]
    assert layout.stage_of_layer(5) == [1, 1, 0, 0, 1]
    assert TrainLayout(2, pp=2, pipeline_layout="Ettt|tL").vpp is None
    with pytest.raises(LayoutError, match=r"places 5 decoder layers \(t\), but the model has 6"):
        layout.stage_layers(6)


def test_final_norm_stage_with_mtp_is_stage_of_last_decoder_layer():
    assert TrainLayout(2, pp=2, pipeline_layout="Ett|mL").final_norm_stage(2) == 0
    assert TrainLayout(2, pp=2, pipeline_layout="Ett|L").final_norm_stage(2) == 1


def test_coordinates_rank_outside_world_is_rejected():
    with pytest.raises(LayoutError, match="rank 4 is not in a world of 4"):
        TrainLayout(4).coordinates(4)
