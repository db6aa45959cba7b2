"""Logits computed by transformers, as a reference for comparisons. Imports no megatron.core: the driver may use it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from mcore_rl.errors import CheckpointError
from mcore_rl.vision.operators import declare_operators
from model_converters.families import family_for
from model_converters.families.parts.hf_config import read_hf_config
from model_converters.vision_model import VISION_TYPES


def transformers_logits(hf_directory: str | Path, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Compute the logits of each sequence separately, on the CPU, in float32.

    Shapes: sequences [S] each -> [S, V] each.
    Raises: CheckpointError with the reason if transformers cannot load the directory.
    """
    # Before transformers imports torchvision for models that read images.
    declare_operators()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    fields = read_hf_config(hf_directory)
    model_type = family_for(fields).transformers_type
    options = {"config": AutoConfig.for_model(**fields | {"model_type": model_type})} if model_type else {}
    try:
        loader = AutoModelForImageTextToText if fields["model_type"] in VISION_TYPES else AutoModelForCausalLM
        model = loader.from_pretrained(
            hf_directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True, **options
        ).eval()
    except Exception as error:  # transformers and its libraries raise many classes
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise CheckpointError(
            f"transformers cannot load {hf_directory} to compute reference logits: {reason}"
        ) from error
    with torch.no_grad():
        return [model(sequence[None]).logits[0] for sequence in sequences]
