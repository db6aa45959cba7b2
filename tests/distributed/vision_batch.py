"""A small batch whose prompts have images, and transformers' log-probabilities and gradients for it.

Each prompt is a list of numbers of text tokens and grids (height, width) of images, in patches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_checkpoint import IMAGE_TOKEN

from mcore_rl.config.models import LoraConfig
from mcore_rl.config.schema import Config
from mcore_rl.types import PromptImages, RankShare, TrajectoryBuffers
from tests.distributed import lora, policy_batch

PROMPTS: list[list[int | tuple[int, int]]] = [[4, (4, 6), 7], [11], [3, (2, 2), 5, (6, 4), 9], [(4, 4), 20]]
PROMPT_OF_SAMPLE = [0, 1, 2, 3, 0, 2]
"""Samples 0 and 4, and 2 and 5, answer the same prompt."""
RESPONSES = [5, 3, 6, 4, 7, 2]
PATCH_VALUES = 3 * 2 * 4 * 4
MERGE_SIZE = 2
ADAPTED = lora.Model("qwen3_vl", lora.ATTENTION + lora.MLP)
"""Adapters of the decoder."""


def prompt(index: int) -> tuple[np.ndarray, PromptImages | None]:
    generator = np.random.default_rng(50 + index)
    tokens: list[int] = []
    grids, starts = [], []
    for part in PROMPTS[index]:
        if isinstance(part, int):
            tokens += generator.integers(3, 89, part).tolist()
            continue
        tokens.append(92)
        starts.append(len(tokens))
        grids.append((1, *part))
        tokens += [IMAGE_TOKEN] * (part[0] * part[1] // MERGE_SIZE**2) + [93]
    if not grids:
        return np.array(tokens, np.int32), None
    patches = sum(height * width for _, height, width in grids)
    pixels = generator.normal(size=(patches, PATCH_VALUES)).astype(np.float32)
    return np.array(tokens, np.int32), PromptImages.of(pixels, np.array(grids, np.int32), np.array(starts, np.int32))


def response(sample: int) -> np.ndarray:
    return np.random.default_rng(70 + sample).integers(3, 89, RESPONSES[sample]).astype(np.int32)


def advantages() -> np.ndarray:
    return np.random.default_rng(1).normal(size=len(RESPONSES)).astype(np.float32)


def chunks() -> list[TrajectoryBuffers]:
    prompts = [prompt(index) for index in range(len(PROMPTS))]
    with_images = [index for index, (_, images) in enumerate(prompts) if images is not None]
    sequences = [np.concatenate([prompts[p][0], response(s)]) for s, p in enumerate(PROMPT_OF_SAMPLE)]
    total = sum(RESPONSES)
    return [
        TrajectoryBuffers(
            tokens=np.concatenate(sequences),
            token_offsets=np.cumsum([0, *map(len, sequences)]).astype(np.int64),
            prompt_tokens=np.array([len(prompts[p][0]) for p in PROMPT_OF_SAMPLE], np.int32),
            response_offsets=np.cumsum([0, *RESPONSES]).astype(np.int64),
            logp_rollout=np.full(total, -4, np.float32),
            versions=np.full(total, policy_batch.VERSION, np.int32),
            trained=np.ones(total, np.uint8),
            images=tuple(images for _, images in prompts if images is not None),
            image_rows=np.array([with_images.index(p) if p in with_images else -1 for p in PROMPT_OF_SAMPLE], np.int32),
        )
    ]


def share(model: Any) -> RankShare:
    """Return this rank's share: every dp-th sample."""
    place = model.layout.coordinates(model.rank)
    index = np.arange(place.dp, len(RESPONSES), model.layout.dp)
    buffers = chunks()[0]
    return RankShare(
        samples=index,
        chunk_ids=np.zeros(len(index), np.int32),
        rows=index.astype(np.int32),
        origins=np.stack([np.zeros_like(index), index], axis=1).astype(np.int32),
        total_tokens=np.diff(buffers.token_offsets)[index].astype(np.int32),
        rewards=advantages()[index],
        advantages=advantages()[index],
        loss_weights=np.full(len(index), 1 / sum(RESPONSES), np.float32),
        version=policy_batch.VERSION,
    )


def config(directory: str | Path, parallel: dict[str, Any], tokens_per_microbatch: int) -> Config:
    """Configuration that trains decoder and tower, or the adapters in directory/adapter."""
    made = policy_batch.config(directory, parallel, tokens_per_microbatch)
    made.rollout.temperature = 1.0
    made.algorithm.entropy_coefficient = 0.0
    adapter = Path(directory) / "adapter"
    made.actor.train_vision = not adapter.exists()
    if adapter.exists():
        made.actor.lora = LoraConfig(ADAPTED.rank, ADAPTED.alpha, ADAPTED.rslora, [], str(adapter))
    return made


def reference_model(directory: str | Path) -> Any:
    from transformers import AutoModelForImageTextToText

    loops = {"attn_implementation": "eager", "experts_implementation": "eager", "local_files_only": True}
    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32, **loops).eval()


def reference_logp(model: Any, sample: int) -> torch.Tensor:
    """Log-probabilities of a sample's response, from the sequence alone. Shapes: -> [n]."""
    before, images = prompt(PROMPT_OF_SAMPLE[sample])
    tokens = torch.from_numpy(np.concatenate([before, response(sample)]).astype(np.int64))
    inputs = {}
    if images is not None:
        grids = torch.from_numpy(images.grids.astype(np.int64))
        kinds = (tokens == IMAGE_TOKEN).int()[None]
        inputs = {"pixel_values": torch.from_numpy(images.pixels), "image_grid_thw": grids, "mm_token_type_ids": kinds}
    # State of the previous sequence.
    model.model.rope_deltas = None
    logits = model(input_ids=tokens[None], **inputs).logits[0]
    log_p = torch.log_softmax(logits[len(before) - 1 : -1], -1)
    return log_p.gather(1, tokens[len(before) :, None])[:, 0]


def reference_gradients(directory: str | Path) -> tuple[list[np.ndarray], dict[str, torch.Tensor]]:
    """Return the log-probabilities of every sample, and the gradients of the loss by HF name."""
    from tests.tiny_models import checkpoint_tensors

    model = reference_model(directory)
    logp = _backward(model)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return logp, checkpoint_tensors(model, gradients)


def write_adapter(directory: Path) -> None:
    """Save random adapters of the decoder to directory/adapter."""
    lora.save_adapter(reference_model(directory), directory, ADAPTED)


def adapter_gradients(directory: str | Path) -> tuple[list[np.ndarray], dict[str, torch.Tensor]]:
    """Return what reference_gradients returns, for the model with its adapters and their gradients."""
    import peft

    model = peft.PeftModel.from_pretrained(reference_model(directory), f"{directory}/adapter", is_trainable=True)
    logp = _backward(model.base_model.model)
    return logp, lora.named({name: parameter.grad for name, parameter in model.named_parameters()})


def _backward(model: Any) -> list[np.ndarray]:
    """Return the log-probabilities of every sample, after the backward pass of the loss."""
    logp = [reference_logp(model, sample) for sample in range(len(RESPONSES))]
    weights = torch.from_numpy(advantages()) / sum(RESPONSES)
    # The ratio of the policy to itself is 1; its gradient is that of the log-probability.
    (-sum(weight * values.sum() for weight, values in zip(weights, logp, strict=True))).backward()  # type: ignore[union-attr]
    return [values.detach().numpy() for values in logp]
