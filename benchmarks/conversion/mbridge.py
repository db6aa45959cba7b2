"""Conversion compared with mbridge 0.15.1, with the same files and the same kind of memory.

mbridge's load_weights and export_weights run unchanged. The model object only has names and tensors, because mbridge
expects the names of TransformerEngine's layers, which do not exist on a CPU. Both sides must produce the same bits.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.conversion import convert
from benchmarks.pairs import Pair, pair_row
from benchmarks.result import Result, SkippedError
from model_converters.families.parts.hf_config import integer
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.plan import local_shapes

FOLDER = Path(__file__).resolve().parents[2] / ".peers"
_NAMES = {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight"}


def run() -> list[Result]:
    torch.set_num_threads(1)
    require_mbridge()
    with tempfile.TemporaryDirectory(prefix="mcore_rl_mbridge_", dir=convert.MEMORY) as directory:
        source = Path(directory) / "hf"
        convert.write_source(source)
        return [
            pair_row("HF -> mcore, ours : mbridge", "", load_pair, source),
            pair_row("mcore -> HF bucket, ours : mbridge", "", bucket_pair, source),
        ]


def load_pair(source: Path) -> Pair:
    """Compare loading into preallocated tensors of one rank."""
    _initialize_alone()
    ours = convert.load_pair(source, 1)
    local = allocate(TrainLayout(1), 0)
    peer = MBridgePeer(source, local)
    ours.ours()
    peer.load()
    # A faster conversion with other results would be no comparison.
    assert all(torch.equal(tensor, local[name]) for name, tensor in ours.local.items()), "mbridge loads other bits"
    return Pair(ours.ours, peer.load, ours.num_bytes)


def bucket_pair(source: Path) -> Pair:
    """Compare export. Ours writes to shared-memory buckets; mbridge's tensors are copied to existing memory, as in a
    sync."""
    _initialize_alone()
    ours = convert.bucket_pair(1)
    peer = MBridgePeer(source, allocate(TrainLayout(1), 0))
    target = torch.ones(ours.num_bytes // 2, dtype=torch.bfloat16)
    return Pair(ours.ours, lambda: peer.export(target), ours.num_bytes)


def allocate(layout: TrainLayout, rank: int) -> dict[str, torch.Tensor]:
    """Create the rank's tensors by our names."""
    shapes = local_shapes(convert.bound_rows(), layout, rank)
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


class _NamedTensors(torch.nn.Module):
    """Tensors under the names that mbridge expects."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], num_layers: int) -> None:
        super().__init__()
        self._tensors = tensors
        # mbridge reads the number of each layer to translate local into global names.
        self.decoder = SimpleNamespace(layers=[SimpleNamespace(layer_number=1 + layer) for layer in range(num_layers)])

    def state_dict(self, *_: object, **__: object) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())


def _initialize_alone() -> None:
    """Create the process groups of a single rank. Every process that makes a pair calls it, including the process that
    measures peak memory."""
    with tempfile.TemporaryDirectory() as store:
        initialize(TrainLayout(1), 0, f"file://{store}/store")


def initialize(layout: TrainLayout, rank: int, init_method: str) -> None:
    """Replace Megatron's process groups.

    Collective: all ranks of the layout.
    """
    from mcore_rl.megatron.model import parallel

    parallel.destroy()
    parallel.initialize(layout, rank=rank, init_method=init_method, timeout_seconds=60, seed=0)


def require_mbridge() -> None:
    """Check that mbridge is installed. Raises: SkippedError."""
    if not (FOLDER / "mbridge").is_dir():
        raise SkippedError("mbridge is absent; scripts/setup_mbridge.sh installs it")


class MBridgePeer:
    """mbridge on one rank, with existing process groups. `local` has its tensors by our names."""

    def __init__(self, source: Path, local: Mapping[str, torch.Tensor]) -> None:
        # At the end of the path: packages in the folder of mbridge must not replace the installed ones.
        if str(FOLDER) not in sys.path:
            sys.path.append(str(FOLDER))
        from mbridge import AutoBridge

        self._bridge = AutoBridge.from_pretrained(str(source))
        self._source = source
        self._model = _NamedTensors(
            {_peer_name(name): tensor for name, tensor in local.items()}, integer(convert.CONFIG, "num_hidden_layers")
        )

    def load(self) -> None:
        with torch.no_grad():
            self._bridge.load_weights([self._model], str(self._source), memory_efficient=True)

    def export(self, target: torch.Tensor) -> None:
        """Export the model and copy each tensor to a part of `target`, as a sync would."""
        done = 0
        for _, tensor in self._bridge.export_weights([self._model]):
            target[done : done + tensor.numel()].view(tensor.shape).copy_(tensor)
            done += tensor.numel()
        assert done == target.numel(), "mbridge exports another number of elements"


def _peer_name(name: str) -> str:
    for ours, theirs in _NAMES.items():
        if name.endswith(ours):
            return name.removesuffix(ours) + theirs
    return name
