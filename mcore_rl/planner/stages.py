"""Parameters of a pipeline stage, from Megatron's model on the meta device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mcore_rl.config.models import LoraConfig
from mcore_rl.config.roles import POLICY, KeyNames
from mcore_rl.megatron.lora.weights import attach_adapters
from mcore_rl.megatron.model.output import PolicyModel
from mcore_rl.megatron.model.sharded import meta_model
from mcore_rl.planner.state import StageParameter
from model_converters.mapping.layout import TrainLayout


def stage_parameters(
    hf_config: dict[str, Any],
    layout: TrainLayout,
    stage: int,
    kind: type[PolicyModel] = PolicyModel,
    *,
    lora: LoraConfig | None = None,
    names: KeyNames = POLICY,
) -> list[list[StageParameter]]:
    """List the parameters of each chunk of a pipeline stage, in Megatron's order, with the adapters of `lora`.

    All ranks of a stage hold parameters of the same sizes, so one of them is built. `kind` is the class of the model.

    Raises: ConfigError for a model that cannot be built.
    """
    # Context parallelism divides tokens and not weights, so cp=1 gives the same parameters.
    with meta_model(hf_config, replace(layout, cp=1), stage * layout.stage_size, kind, names=names) as chunks:
        if lora is not None and lora.rank:
            attach_adapters(chunks, replace(lora, path=None), hf_config, replace(layout, cp=1), seed=0)
        return [
            [
                StageParameter(
                    parameter.numel(),
                    not getattr(parameter, "allreduce", True),
                    bool(getattr(parameter, "shared_embedding", False)),
                    trained=parameter.requires_grad,
                )
                for parameter in chunk.parameters()
            ]
            for chunk in chunks
        ]
