"""Weight updates of an SGLang rank (runs in SGLang's environment).

The places of slices are recorded while SGLang's own loaders run (kept_slices.py). An update follows SGLang's own order
for receivers that write parameters themselves: restore the checkpoint format, receive, compute derived weights, convert
to the format of the kernels (WeightUpdater.begin_weight_update and end_weight_update). Checked with SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.model_executor.model_runner_components.weight_updater import _unsupported_derived_weight_cache_error
from sglang.srt.model_loader.loader import DefaultModelLoader, post_load_weights
from sglang.srt.runtime_context import get_exec

from mcore_rl.engines.held_weights import Held
from mcore_rl.engines.kept_slices import KeptSlice, SliceLoader, outermost_modules, record, storage_key
from mcore_rl.engines.sglang.held_weights import held_tensors
from mcore_rl.errors import ConfigError
from mcore_rl.weights.slices.shard_map import Boxes


class ParameterLoader(SliceLoader):
    """Copies slices straight into the parameters.

    device: device of the model with its index, such as cuda:0. SGLang compares it with the device of each parameter.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        super().__init__(model)
        self._device = device
        self._recorded: list[KeptSlice] | None = None
        self._whole = True

    def record(self, whole: Mapping[str, torch.Tensor]) -> list[KeptSlice]:
        """Implement SliceLoader.record. Only the first call runs SGLang's loaders and accesses parameters, so later
        calls are allowed while the memory of the weights is released.

        Raises: ConfigError for a model that SGLang cannot update.
        """
        if self._recorded is None:
            require_updatable(self._model)
            self._restore()
            kept = record(self._model, self._places(), whole, "SGLang")
            self.keep(kept)
            self._clear_padding(kept)
            self._convert()
            self._recorded = kept
        return self._recorded

    def held(self, boxes: Mapping[str, Boxes]) -> Iterator[Held]:
        return held_tensors(self._model, boxes)

    def begin(self, *, whole: bool = True) -> None:
        super().begin(whole=whole)
        self._whole = whole
        self._restore()

    def finish(self) -> None:
        super().finish()
        # Computes w_kc and w_vc of latent attention from kv_b_proj in the checkpoint format. SGLang's loaders would do
        # this, but they have not run.
        if self._whole or any(each.module.endswith("kv_b_proj") for each in self._missing):
            post_load_weights(self._model)
        self._convert()

    def _restore(self) -> None:
        """Restore the checkpoint format of the parameters. Does nothing where they have it already."""
        for module in self._converted():
            DefaultModelLoader.restore_weights_before_loading(module, self._device)

    def _convert(self) -> None:
        """Convert the parameters to the format of the kernels."""
        for module in self._converted():
            DefaultModelLoader.postprocess_weights(module, self._device)

    def _converted(self) -> list[torch.nn.Module]:
        """Return the modules that change their format for an update. Modules with frozen weights only keep it: SGLang
        restores the shapes of some formats but not the values, and would convert converted weights again. A call for a
        module includes the modules inside it."""
        if self._whole:
            return [self._model]
        held = (each.module for kept in self._kept.values() for each in kept)
        return [self._modules[name] for name in outermost_modules((each.module for each in self._missing), held)]

    @torch.no_grad()
    def _clear_padding(self, kept: Sequence[KeptSlice]) -> None:
        """Zero the padding that no update writes: kernels read it, and dummy initialisation leaves random values."""
        by_parameter: dict[tuple[str, str], list[KeptSlice]] = {}
        for each in kept:
            by_parameter.setdefault((each.module, each.parameter), []).append(each)
        for parts in by_parameter.values():
            parameter = self._parameter(parts[0])
            if sum(part.numel for part in parts) < parameter.numel():
                covered = torch.zeros(parameter.shape, dtype=torch.bool, device=parameter.device)
                for part in parts:
                    covered.as_strided(part.size, part.strides, part.offset).fill_(True)
                parameter.masked_fill_(~covered, 0)

    def _parameter_names(self) -> set[str]:
        return {f"{module}.{parameter}" for module, parameter in self._places().values()}

    def _copy(self, kept: KeptSlice, offset: int, source: torch.Tensor) -> None:
        self._parameter(kept).as_strided(source.shape, kept.strides, offset).copy_(source)

    def _parameter(self, kept: KeptSlice) -> torch.Tensor:
        parameter: torch.Tensor = getattr(self._modules[kept.module], kept.parameter).data
        return parameter

    def _places(self) -> dict[int, tuple[str, str]]:
        """Return module and name of every parameter by storage_key."""
        places: dict[int, tuple[str, str]] = {}
        for name, parameter in self._model.named_parameters():
            module, _, key = name.rpartition(".")
            # Tied modules share a storage; the first name stands for both.
            places.setdefault(storage_key(parameter), (module, key))
        return places


def require_updatable(model: torch.nn.Module) -> None:
    """Check that the model can receive updates.

    Raises: ConfigError with SGLang's reason for weights that its own updates would leave stale, and for formats that
        SGLang does not convert back before an update.
    """
    reason = _unsupported_derived_weight_cache_error(model)
    experts = [module.quant_method for module in model.modules() if isinstance(module, FusedMoE)]
    moe = get_exec().moe
    if any(getattr(method, "use_triton_kernels", False) for method in experts):
        reason = "experts of moe_runner_backend=triton_kernels are transposed"
    elif any(getattr(method, "w13_swiglu_interleaved", False) for method in experts):
        reason = "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED interleaves the rows of experts; unset it"
    elif moe.enable_eplb or moe.ep_num_redundant_experts:
        reason = "enable_eplb and ep_num_redundant_experts give experts other numbers than the model's"
    if reason is not None:
        raise ConfigError(f"SGLang cannot update the weights of this model: {reason}")
