"""Helpers of conversion tests: conversions in a child process, and loading and saving on real ranks."""

from __future__ import annotations

import io
import multiprocessing
import os
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from model_converters.families.parts.hf_config import read_hf_config
from model_converters.mapping.layout import TrainLayout
from tests.distributed.launch import launch


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """Call function(*args) in a child process that has imported megatron-core and belongs to no process group."""
    (result,) = launch(_without_group, 1, function, args)
    return result


def _without_group(_: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    dist.destroy_process_group()
    return function(*args)


def to_mcore(hf: Path, out: Path, sizes: dict[str, Any], max_file_bytes: int = 30_000) -> None:
    """Convert in a child process; the file size is so small that every rank writes several files."""
    alone(_to_mcore, hf, out, sizes, max_file_bytes)


def _to_mcore(hf: Path, out: Path, sizes: dict[str, Any], max_file_bytes: int) -> None:
    from model_converters.dcp.convert import to_mcore

    to_mcore(hf, out, TrainLayout(**sizes), max_file_bytes=max_file_bytes)


def to_hf(ckpt: Path, out: Path, hf: Path | None = None) -> None:
    """Convert in a child process to several shards."""
    alone(_to_hf, ckpt, out, hf)


def _to_hf(ckpt: Path, out: Path, hf: Path | None) -> None:
    from model_converters.dcp.convert import to_hf

    to_hf(ckpt, out, hf=hf, max_shard_bytes=50_000)


def there_and_back(hf: Path, ckpt: Path, out: Path, sizes: dict[str, Any]) -> None:
    """Convert to a checkpoint and back in one child process."""
    alone(_there_and_back, hf, ckpt, out, sizes)


def _there_and_back(hf: Path, ckpt: Path, out: Path, sizes: dict[str, Any]) -> None:
    _to_mcore(hf, ckpt, sizes, 30_000)
    _to_hf(ckpt, out, None)


def cli(*arguments: object) -> tuple[int, str, str]:
    """Run `python -m model_converters ARGUMENTS` in a child process. Returns (exit code, stdout, stderr).

    An uncaught exception fails the test.
    """
    result: tuple[int, str, str] = alone(_cli, tuple(map(str, arguments)))
    return result


def _cli(arguments: tuple[str, ...]) -> tuple[int, str, str]:
    from model_converters.cli import main

    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        code = main(arguments)
    return code, stdout.getvalue(), stderr.getvalue()


def hf_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Read all tensors with the safetensors library."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same_tensors(found: Path, wanted: Path) -> None:
    """Compare names, dtypes and every bit."""
    ours, theirs = hf_tensors(found), hf_tensors(wanted)
    assert set(ours) == set(theirs)
    assert {name: t.dtype for name, t in ours.items()} == {name: t.dtype for name, t in theirs.items()}
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def build(hf_config: dict[str, Any], sizes: dict[str, Any]) -> tuple[list[Any], TrainLayout]:
    """Build a real model in the current process group; its weights are undefined."""
    from mcore_rl.config.models import ActorConfig
    from mcore_rl.config.roles import ModelRole
    from mcore_rl.config.schema import ModelConfig
    from mcore_rl.megatron.model import model, parallel
    from mcore_rl.resolved.model import ResolvedModel

    layout = TrainLayout(**sizes)
    parallel.initialize_groups(layout, timeout_seconds=30, seed=3)
    role = ModelRole.policy(ActorConfig(), ModelConfig(hf_path="", dtype="float32"))
    return model.build_model(ResolvedModel(role, hf_config, layout)), layout


def load_distributed(directory: str, chunks: list[Any]) -> None:
    """Load the chunks with Megatron's reader; tensors that it does not load stay NaN."""
    from megatron.core import dist_checkpointing
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        parameter.data.fill_(torch.nan)
    metadata = ensure_metadata_has_dp_cp_group({})
    state = {str(index): chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)}
    loaded = dist_checkpointing.load(state, directory)
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[str(index)], strict=True)


def save_distributed(rank: int, hf: str, directory: str, sizes: dict[str, Any], naming: str = "default") -> None:
    """Load the HF model on this rank and save it with Megatron, in one of its key schemes."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    from mcore_rl.megatron.model.loading import load_hf

    # Megatron's writers report through a server that is spawned, so that every rank would import torch again.
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    chunks, layout = build(read_hf_config(hf), sizes)
    load_hf(chunks, hf, layout)
    settings = {"by layer": {"non_homogeneous_layers": True}, "by expert": {"singleton_local_shards": True}}
    metadata = ensure_metadata_has_dp_cp_group(settings.get(naming, {}))
    if naming == "stacked layers":
        for chunk in chunks:
            chunk.config.moe_layer_freq = 1
    if rank == 0:
        os.makedirs(directory)
    dist.barrier()
    state = {str(i): chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}
    dist_checkpointing.save(state, directory)


def arrays(chunks: list[Any]) -> dict[str, np.ndarray]:
    from mcore_rl.megatron.model.names import canonical_tensors

    return {name: tensor.numpy().copy() for name, tensor in canonical_tensors(chunks).items()}
