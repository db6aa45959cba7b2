"""Record the parts of HF tensors that the ranks of SGLang keep, without engines (runs in SGLang's environment).

Reads from stdin a JSON list of cases {"fields": config.json, "arguments": ServerArgs, "shapes": {HF tensor: shape},
"ranks": numbers of the recorded ranks}. Prints for each case one line of JSON: {HF tensor: [start, size]} of each rank.

The model of a rank is built on the meta device and loads meta tensors through the branches that SGLang's loaders take
on CUDA. No process group, kernel or weight is needed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from mcore_rl.engines.sglang.devices import cpu_patches

cpu_patches.prepare()

from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.layers import deep_gemm_wrapper, linear, parameter, vocab_parallel_embedding  # noqa: E402
from sglang.srt.layers.dp_attention import initialize_dp_attention  # noqa: E402
from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe  # noqa: E402
from sglang.srt.layers.moe.utils import initialize_moe_config  # noqa: E402
from sglang.srt.model_loader import loader  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from mcore_rl.engines.kept_slices import record, storage_key  # noqa: E402

GROUPS = ("tp", "attn_tp", "moe_tp", "moe_ep")
STAGE = SimpleNamespace(rank_in_group=0, world_size=1, is_first_rank=True, is_last_rank=True)
Boxes = dict[str, tuple[Sequence[int], Sequence[int]]]


def recorded(directory: str, arguments: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], rank: int) -> Boxes:
    """Return the boxes that a rank keeps, by HF tensor."""
    settings = ServerArgs(model_path=directory, device="cpu", dtype="bfloat16", skip_tokenizer_init=True, **arguments)
    reset_context()  # of the previous rank
    publish(settings, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    initialize_dp_attention(settings)
    initialize_moe_config()
    parallel = get_parallel()
    groups = {
        f"{name}_group": SimpleNamespace(
            rank_in_group=getattr(parallel, f"{name}_rank"),
            world_size=getattr(parallel, f"{name}_size"),
            cpu_group=None,
        )
        for name in GROUPS
    }
    with parallel.override(pp_group=STAGE, **groups), torch.device("meta"):
        model = loader._initialize_model(ModelConfig.from_server_args(settings), LoadConfig())
        whole = {name: torch.empty(shape) for name, shape in shapes.items()}
    places: dict[int, tuple[str, str]] = {}
    for name, weight in model.named_parameters():
        module, _, key = name.rpartition(".")
        places.setdefault(storage_key(weight), (module, key))
    return {each.name: (each.start, each.size) for each in record(model, places, whole, "SGLang")}


def main() -> None:
    torch.set_default_dtype(torch.bfloat16)
    with ExitStack() as stack:
        for module in (linear, parameter, vocab_parallel_embedding, fused_moe):
            stack.enter_context(mock.patch.object(module, "_is_cpu", False))
        # DeepEP and DeepGEMM are packages for CUDA, which loading does not call.
        stack.enter_context(mock.patch.object(fused_moe, "create_moe_dispatcher", return_value=None))
        stack.enter_context(mock.patch.object(deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True))
        for case in json.load(sys.stdin):
            with tempfile.TemporaryDirectory() as directory:
                (Path(directory) / "config.json").write_text(json.dumps(case["fields"]))
                boxes = [recorded(directory, case["arguments"], case["shapes"], rank) for rank in case["ranks"]]
            print(json.dumps(boxes))


if __name__ == "__main__":
    main()
