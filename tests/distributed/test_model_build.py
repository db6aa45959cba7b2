"""Building, naming, loading and initializing a model on its ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from mcore_rl.runtime.addresses import free_port
from tests.distributed.built import build
from tests.distributed.launch import RankFailedError, launch
from tests.tiny_models import reference_logits, tiny_fields, write_tiny_model

# ---- names ----


def _name_a_stranger(_: int) -> None:
    from mcore_rl.megatron.model.names import canonical_tensors

    (chunk,), _layout = build(tiny_fields("qwen3"), {})
    chunk.decoder.layers[1].mlp.gain = torch.nn.Parameter(torch.ones(1))
    canonical_tensors([chunk])


def test_canonical_tensors_with_unknown_name_raises() -> None:
    with pytest.raises(RankFailedError, match=r"decoder\.layers\.1\.mlp\.gain has no canonical name"):
        launch(_name_a_stranger, 1)


def test_canonical_name_covers_transformer_engine_names() -> None:
    """TransformerEngine's spec cannot be built here; the names are from checkpoints of megatron-core 0.16.1."""
    from types import SimpleNamespace

    from mcore_rl.megatron.model.names import canonical_name

    layer = SimpleNamespace(layer_number=7, mlp=SimpleNamespace(local_expert_indices=[4, 5, 6, 7]))
    model = SimpleNamespace(decoder=SimpleNamespace(layers=[layer, layer]), has_hf_names=False)
    spelled = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
        "mlp.experts.linear_fc1.weight2": "mlp.experts.linear_fc1.weight6",
        "mlp.experts.local_experts.3.linear_fc2.weight": "mlp.experts.linear_fc2.weight7",
        "self_attention.q_layernorm.weight": "self_attention.q_layernorm.weight",
        "mlp.experts.linear_fc1.bias1": "mlp.experts.linear_fc1.bias5",
        "mlp.experts.local_experts.3.linear_fc2.bias": "mlp.experts.linear_fc2.bias7",
        "self_attention.core_attention.softmax_offset": "self_attention.core_attention.softmax_offset",
        "self_attention.core_attention.indexer.k_norm.bias": "self_attention.core_attention.indexer.k_norm.bias",
        "mlp.router.bias": "mlp.router.bias",
        "mlp.router.expert_bias": "mlp.router.expert_bias",
        "mlp.shared_experts.linear_fc1.weight": "mlp.shared_experts.linear_fc1.weight",
        "self_attention.linear_kv_down_proj.weight": "self_attention.linear_kv_down_proj.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    }
    for live, canonical in spelled.items():
        assert canonical_name(model, f"decoder.layers.1.{live}") == f"decoder.layers.6.{canonical}"
    with pytest.raises(KeyError, match="weight1"):
        canonical_name(model, "decoder.layers.0.mlp.experts.weight1")


def test_meta_model_with_transformer_engine_uses_local_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TransformerEngine's layers cannot be built on the meta device, so `plan` and the converters always use local
    ones."""
    from mcore_rl.megatron.model import model
    from mcore_rl.megatron.model.sharded import rank_state
    from mcore_rl.resolved.installed import planned_machine
    from model_converters.mapping.layout import TrainLayout

    here = rank_state(tiny_fields("qwen3_moe"), TrainLayout(1), 0)
    monkeypatch.setattr(model, "here", lambda: planned_machine(cuda=True))
    assert rank_state(tiny_fields("qwen3_moe"), TrainLayout(1), 0).shapes == here.shapes


# ---- loading ----


def _load(_: int, directory: str) -> None:
    from mcore_rl.megatron.model.loading import load_hf

    hf_config = json.loads((Path(directory) / "config.json").read_text())
    chunks, layout = build(hf_config, {})
    load_hf(chunks, directory, layout)


def test_load_hf_with_missing_or_extra_tensor_names_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_tiny_model(tmp_path, "qwen3")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.9.surplus.weight"] = tensors.pop("model.layers.2.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RankFailedError) as caught:
        launch(_load, 1, str(tmp_path))
    for part in ("ConfigError: model.hf_path=", "model.layers.2.mlp.up_proj.weight", "model.layers.9.surplus.weight"):
        assert part in str(caught.value)


# ---- attributes and initial values ----


def _marks(_: int, random_init: bool) -> dict[str, tuple[bool, bool, bool]]:
    (chunk,), _layout = build(tiny_fields("qwen3_moe"), {"tp": 2, "ep": 2}, random_init=random_init)
    marks = ("tensor_model_parallel", "sequence_parallel", "allreduce")
    return {name: tuple(bool(getattr(p, mark, False)) for mark in marks) for name, p in chunk.named_parameters()}


def test_build_model_without_init_keeps_tensor_parallel_attributes() -> None:
    """Megatron sets them during initialization; without them a norm counts only the first tensor-parallel shard."""
    initialised, (left, _) = launch(_marks, 2, True)[0], launch(_marks, 2, False)
    assert left == initialised
    assert left["decoder.layers.0.self_attention.linear_qkv.weight"][0]
    assert left["decoder.layers.0.input_layernorm.weight"][1]


def _initial_values(_: int, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    from mcore_rl.megatron.model.names import canonical_tensors

    chunks, _layout = build(tiny_fields("qwen3_moe"), sizes, random_init=True)
    return {name: tensor.numpy().copy() for name, tensor in canonical_tensors(chunks).items()}


def test_random_init_is_equal_for_replicas_and_different_for_shards() -> None:
    first, second = launch(_initial_values, 2, {"ep": 2})
    shared = set(first) & set(second)
    assert "decoder.layers.3.mlp.router.weight" in shared
    assert all(np.array_equal(first[name], second[name]) for name in shared)
    assert not np.array_equal(
        first["decoder.layers.0.mlp.experts.linear_fc1.weight0"],
        second["decoder.layers.0.mlp.experts.linear_fc1.weight4"],
    )
    upper, lower = launch(_initial_values, 2, {"tp": 2})
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert not np.array_equal(upper[qkv], lower[qkv])
    front, back = launch(_initial_values, 2, {"pp": 2})
    assert not np.array_equal(front[qkv], back[qkv.replace("layers.0", "layers.2")])
    again, _ = launch(_initial_values, 2, {"pp": 2})
    assert all(np.array_equal(front[name], value) for name, value in again.items())


def _initial_down_projection(_: int) -> np.ndarray:
    (chunk,), _layout = build(tiny_fields("deepseek_v3", initializer_range=0.5), {"tp": 2}, random_init=True)
    attention = chunk.decoder.layers[2].self_attention
    assert not np.array_equal(attention.linear_q_up_proj.weight.detach(), 0)
    return torch.cat([attention.linear_q_down_proj.weight, attention.linear_kv_down_proj.weight]).detach().numpy()


def test_random_init_of_replicated_projections_uses_initializer_range() -> None:
    """Megatron uses torch's default initialization for them."""
    first, second = launch(_initial_down_projection, 2)
    np.testing.assert_array_equal(first, second)
    assert first.std() == pytest.approx(0.5, rel=0.1)


# ---- bfloat16 ----


def _bfloat16_logits(_: int, directory: str, tokens: list[int]) -> np.ndarray:
    from megatron.core.transformer.module import Float16Module

    from mcore_rl.megatron.model.attention.packed import pack_sequences
    from mcore_rl.megatron.model.loading import load_hf
    from mcore_rl.megatron.model.output import output_weight

    hf_config = json.loads((Path(directory) / "config.json").read_text())
    (chunk,), layout = build(hf_config, {}, dtype="bfloat16")
    load_hf([chunk], directory, layout)
    wrapped = Float16Module(chunk.config, chunk)
    with torch.no_grad():
        row, sequences = torch.tensor(tokens)[None], pack_sequences([len(tokens)])
        hidden = wrapped(row, None, None, packed_seq_params=sequences, fp32_output=False)
        assert hidden.dtype == output_weight(wrapped).dtype == torch.bfloat16
        return (hidden.float() @ output_weight(wrapped).float().t()).numpy()


def test_bfloat16_model_matches_its_float32_checkpoint(tmp_path: Path) -> None:
    """Tolerance 3e-1 for logits with a standard deviation above 2: eight bits of mantissa through four layers."""
    directory = str(write_tiny_model(tmp_path, "qwen3"))
    tokens = list(range(0, 60, 3))
    (ours,) = launch(_bfloat16_logits, 1, directory, tokens)
    (theirs,) = reference_logits(directory, [tokens])
    assert theirs.std() > 1
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=0.3)


# ---- process groups ----


def _join(rank: int, port: int) -> list[int]:
    from mcore_rl.config.models import ParallelConfig
    from mcore_rl.megatron.model import parallel
    from mcore_rl.resolved import layout

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # like a run on one machine
    world_size = dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    placed = layout.train_layout(ParallelConfig(ep=2), world_size, tiny_fields("qwen3_moe"))
    options = {"init_method": f"tcp://127.0.0.1:{port}", "timeout_seconds": 30, "seed": 1}
    try:
        parallel.initialize(placed, rank=rank, **options)
        own = psutil.Process().net_connections("tcp")
        hosts = {connection.laddr.ip for connection in own if connection.status == psutil.CONN_LISTEN}
        assert hosts == {"127.0.0.1"}  # only the store of rank 0 and gloo's pairs listen
        total = torch.tensor([rank + 1])
        dist.all_reduce(total)
        return [int(total), dist.get_world_size()]
    finally:
        parallel.destroy()
        parallel.destroy()


def test_initialize_at_an_address_and_destroy_twice() -> None:
    assert launch(_join, 2, free_port()) == [[3, 2], [3, 2]]


def _meet_where_another_listens(rank: int) -> str:
    from mcore_rl.errors import ConfigError
    from mcore_rl.megatron.model.parallel import _rendezvous

    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError) as refused:
        _rendezvous(f"tcp://127.0.0.1:{other.getsockname()[1]}", rank, 1, timedelta(seconds=5))
    return str(refused.value)


def test_rendezvous_with_used_port_names_host_and_port() -> None:
    (said,) = launch(_meet_where_another_listens, 1)
    assert re.match(
        rf"{socket.gethostname()}: port \d+ for the rendezvous of ranks is used by another process; start again", said
    )


def test_load_hf_with_truncated_file_names_it(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "whole", "qwen3")
    broken = tmp_path / "broken"
    shutil.copytree(directory, broken)
    shard = broken / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(RankFailedError, match=r"ConfigError: model\.hf_path=.*model\.safetensors"):
        launch(_load, 1, str(broken))
