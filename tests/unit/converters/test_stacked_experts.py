"""Checkpoints that store all experts of a layer in one tensor."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from model_converters.errors import ConversionError
from model_converters.hf.io import HFCheckpoint, HFWriter
from model_converters.hf.mxfp4 import dequantise
from model_converters.mapping.completeness import check_complete
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.plan import export_pieces, export_plan
from tests.tiny_models import tiny_fields, tiny_model
from tests.unit.converters.hf_models import assert_same, bound_rows, load_rank, stored, write_hf

NAME = "model.layers.0.mlp.experts.gate_up_proj"


# Square matrices, so that the orientation cannot be told from shapes.
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3_moe", {"moe_intermediate_size": 32}),
        ("mixtral", {"intermediate_size": 32}),
        ("deepseek_v2", {}),
        ("deepseek_v3", {}),
        ("glm4_moe", {"moe_intermediate_size": 32}),
    ],
)
def test_checkpoint_of_stacked_experts_equals_hub_format(kind, changes, tmp_path):
    model = tiny_model(kind, **changes)
    model.save_pretrained(tmp_path / "hub")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    written = stored(tmp_path / "stacked")
    assert any(name.endswith("experts.gate_up_proj") for name in written)
    assert not any("experts.0." in name for name in written)
    with HFCheckpoint(tmp_path / "stacked") as checkpoint:
        check_complete(bound_rows(checkpoint.config), checkpoint.shapes)
        assert_same({name: checkpoint.read(name) for name in checkpoint.shapes}, stored(tmp_path / "hub"))


def stacked_experts(hf, prefix, num_experts):
    """Stack the experts of one layer like transformers 5."""
    experts = {name: tensor for name, tensor in hf.items() if name.startswith(f"{prefix}experts.")}
    gate, up, down = (
        torch.stack([experts[f"{prefix}experts.{expert}.{part}_proj.weight"] for expert in range(num_experts)])
        for part in ("gate", "up", "down")
    )
    others = {name: tensor for name, tensor in hf.items() if name not in experts}
    return others | {f"{prefix}experts.gate_up_proj": torch.cat([gate, up], 1), f"{prefix}experts.down_proj": down}


def test_load_tensors_reads_stacked_and_single_experts(family_configs, random_hf, local_mcore, tmp_path):
    # Releases may stack the experts of multi-token prediction and not those of the decoder, or the other way round.
    config, layout = family_configs["deepseek_v3"], TrainLayout(8, tp=2, pp=2, ep=2, etp=2)
    hf = random_hf(config)
    mixed = stacked_experts(stacked_experts(hf, "model.layers.3.mlp.", 8), "model.layers.4.mlp.", 8)
    assert len(hf) - len(mixed) == 2 * (3 * 8 - 2)
    with HFCheckpoint(write_hf(tmp_path / "hf", config, mixed)) as checkpoint:
        for rank in range(layout.world_size):
            assert_same(load_rank(checkpoint, layout, rank), local_mcore(hf, config, layout, rank))


def test_read_stacked_expert_reads_only_its_bytes(moe_config, random_hf, tmp_path):
    hf = random_hf(moe_config)
    name = "model.layers.0.mlp.experts.5.up_proj.weight"
    with HFCheckpoint(write_hf(tmp_path, moe_config, stacked_experts(hf, "model.layers.0.mlp.", 8))) as checkpoint:
        assert checkpoint._stored[name].num_bytes == hf[name].nbytes
        assert torch.equal(checkpoint.view(name, 1, 3, 5, (1, 3)), hf[name][1:3, 3:8])


def test_stacked_experts_of_another_shape_are_rejected(moe_config, random_hf, tmp_path):
    stacked = stacked_experts(random_hf(moe_config), "model.layers.0.mlp.", 8)
    stacked[NAME] = stacked[NAME].transpose(1, 2)
    with pytest.raises(ConversionError, match=rf"{NAME} is \(8, 12, 8\) instead of \(8, 8, 12\)"):
        HFCheckpoint(write_hf(tmp_path, moe_config, stacked))


def test_expert_that_is_stored_twice_is_rejected(moe_config, random_hf, tmp_path):
    hf = random_hf(moe_config)
    both = hf | stacked_experts(hf, "model.layers.0.mlp.", 8)
    message = r"experts\.0\.gate_proj\.weight is stored twice"
    with pytest.raises(ConversionError, match=message):
        HFCheckpoint(write_hf(tmp_path, moe_config, both))


def test_stacked_tensor_without_a_row_is_unknown(moe_config, random_hf, tmp_path):
    stacked = random_hf(moe_config) | {f"{NAME}_bias": torch.zeros(8, 8)}
    with (
        HFCheckpoint(write_hf(tmp_path, moe_config, stacked)) as checkpoint,
        pytest.raises(ConversionError, match=f"1 HF tensors unknown: {NAME}_bias"),
    ):
        check_complete(bound_rows(moe_config), checkpoint.shapes)


SIZES = [pytest.param(32, 32, id="square"), pytest.param(64, 32, id="wide"), pytest.param(32, 64, id="narrow")]


def gpt_oss_config(hidden, intermediate, **changes):
    return tiny_fields("gpt_oss", hidden_size=hidden, intermediate_size=intermediate, **changes)


@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_transposed_experts_are_read_like_the_model(hidden, intermediate, tmp_path):
    model = tiny_model("gpt_oss", hidden_size=hidden, intermediate_size=intermediate)
    model.save_pretrained(tmp_path)
    # The product of transformers' GptOssExperts for one expert: x @ gate_up_proj, then every second element.
    experts, x = model.model.layers[2].mlp.experts, torch.eye(hidden)
    gate_up = x @ experts.gate_up_proj[5] + experts.gate_up_proj_bias[5]
    with HFCheckpoint(tmp_path) as checkpoint:
        named = {name: checkpoint.read(f"model.layers.2.mlp.experts.5.{name}") for name in EXPERT_NAMES}
        check_complete(bound_rows(checkpoint.config), checkpoint.shapes)
        part = checkpoint.view("model.layers.2.mlp.experts.5.up_proj.weight", 1, 3, 5, (1, 7))
    assert torch.equal(part, named["up_proj.weight"][1:7, 3:8])
    assert torch.equal(x @ named["gate_proj.weight"].T + named["gate_proj.bias"], gate_up[:, 0::2])
    assert torch.equal(x @ named["up_proj.weight"].T + named["up_proj.bias"], gate_up[:, 1::2])
    assert torch.equal(named["down_proj.weight"].T, experts.down_proj[5])
    assert torch.equal(named["down_proj.bias"], experts.down_proj_bias[5])


EXPERT_NAMES = [f"{part}_proj.{kind}" for part in ("gate", "up", "down") for kind in ("weight", "bias")]
GPT_OSS_LAYOUTS = [
    {"world_size": 4, "tp": 2, "ep": 2},
    {"world_size": 8, "tp": 2, "pp": 2, "ep": 4},
    {"world_size": 4, "pp": 2, "vpp": 2, "ep": 2},
    {"world_size": 8, "tp": 2, "cp": 2, "ep": 2, "shard_parameters": True},
]


@pytest.mark.parametrize("sizes", GPT_OSS_LAYOUTS, ids=str)
def test_writer_assembles_stacked_experts_of_all_ranks(sizes, tmp_path):
    model, layout = tiny_model("gpt_oss"), TrainLayout(**sizes)
    model.save_pretrained(tmp_path / "hf")
    owner = HFWriter(tmp_path / "out", 30_000)
    with HFCheckpoint(tmp_path / "hf") as checkpoint:
        bound = bound_rows(checkpoint.config)
        plans = export_plan(bound, layout)
        owner.begin(plans)
        for rank in range(layout.world_size):
            writer = owner if rank == 0 else HFWriter(tmp_path / "out", 30_000)
            if rank:
                writer.attach(plans)
            for plan, piece, view in export_pieces(plans, load_rank(checkpoint, layout, rank, bound), rank):
                writer.write(plan, piece, view)
            if rank:
                writer.close()
    owner.finish(tmp_path / "hf")
    assert_same(stored(tmp_path / "out"), stored(tmp_path / "hf"))


def test_writer_rejects_plan_without_some_experts(tmp_path):
    plans = export_plan(bound_rows(tiny_fields("gpt_oss")), TrainLayout(1))
    with pytest.raises(ConversionError, match=r"the plan lacks experts of model\.layers\.0\.mlp\.experts\.down_proj"):
        HFWriter(tmp_path / "out").begin([plan for plan in plans if ".experts.3.down_proj.weight" not in plan.hf_name])


def test_layout_that_divides_expert_biases_is_rejected():
    with pytest.raises(ConversionError, match=r"etp 2 does not divide .*linear_fc2\.bias\{e\}; set etp to 1"):
        export_plan(bound_rows(tiny_fields("gpt_oss")), TrainLayout(2, tp=2, etp=2))


def packed(tensors, config, seed=0):
    """Replace the stacked matrices of a gpt-oss model by MXFP4 codes, and return the values that they encode."""
    generator = torch.Generator().manual_seed(seed)
    experts, hidden, intermediate = (config[key] for key in ("num_local_experts", "hidden_size", "intermediate_size"))
    tensors, values = dict(tensors), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        del tensors[name]
        rows, columns = (2 * intermediate, hidden) if "gate_up" in name else (hidden, intermediate)
        codes = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(118, 124, codes.shape[:-1], generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": exponents}
        # transformers' function returns the matrices of the bfloat16 releases: transposed.
        values[name] = convert_moe_packed_tensors(codes, exponents)
    return tensors, values


@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_mxfp4_release_equals_dequantised_release(hidden, intermediate, tmp_path):
    config = gpt_oss_config(hidden, intermediate, num_hidden_layers=2, torch_dtype="bfloat16")
    model = tiny_model("gpt_oss", hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=2)
    model.bfloat16().save_pretrained(tmp_path / "model")
    whole = stored(tmp_path / "model")
    tensors, values = packed(whole, config)
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    write_hf(tmp_path / "mxfp4", config | {"quantization_config": quantised}, tensors)
    write_hf(tmp_path / "plain", config, whole | values)
    layout = TrainLayout(2, ep=2)
    with HFCheckpoint(tmp_path / "mxfp4") as ours, HFCheckpoint(tmp_path / "plain") as plain:
        check_complete(bound_rows(config), ours.shapes)
        assert_same(*({name: each.read(name) for name in plain.shapes} for each in (ours, plain)))
        name = "model.layers.1.mlp.experts.6.down_proj.weight"
        assert ours.dtype(name) == torch.bfloat16
        assert torch.equal(ours.view(name, 1, 8, 16), plain.read(name)[:, 8:24])
        assert_same(*(load_rank(each, layout, 1, bound_rows(config)) for each in (ours, plain)))


def test_dequantise_all_codes_and_exponents_matches_transformers():
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16).contiguous()
    exponents = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 16).contiguous()
    out = torch.empty(256, 512, dtype=torch.bfloat16)
    dequantise(codes[0], exponents[0], out)
    wanted = convert_moe_packed_tensors(codes, exponents)[0].T.contiguous()
    assert torch.equal(out.view(torch.int16), wanted.view(torch.int16))


def test_mxfp4_release_with_unfitting_tensors_is_rejected(tmp_path):
    config = gpt_oss_config(32, 64, num_hidden_layers=1)
    tiny_model("gpt_oss", intermediate_size=64, num_hidden_layers=1).save_pretrained(tmp_path / "model")
    tensors, values = packed(stored(tmp_path / "model"), config)
    name = "model.layers.0.mlp.experts.down_proj"
    without = {key: tensor for key, tensor in tensors.items() if key != f"{name}_scales"}
    for number, (found, message) in enumerate(
        [
            (without, f"{name}_scales is missing"),
            (tensors | {f"{name}_scales": tensors[f"{name}_scales"][:, :, :1]}, rf"{name}_scales is \(8, 32, 1\)"),
            (tensors | values, r"experts\.0\.gate_proj\.weight is stored twice"),
        ]
    ):
        with pytest.raises(ConversionError, match=message):
            HFCheckpoint(write_hf(tmp_path / str(number), config, found))


def test_mxfp4_weights_of_other_families_are_rejected(moe_config, random_hf, tmp_path):
    packed_config = moe_config | {"quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(ConversionError, match=r"quantization_config \(mxfp4\) is not supported for this family"):
        bound_rows(packed_config)
    codes = {f"{NAME}_blocks": torch.zeros(8, 8, 1, 16, dtype=torch.uint8)}
    with pytest.raises(ConversionError, match=f"{NAME}_blocks belongs to mxfp4 weights"):
        HFCheckpoint(write_hf(tmp_path, moe_config, random_hf(moe_config) | codes))
