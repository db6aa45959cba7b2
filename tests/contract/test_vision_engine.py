"""Models that read images on real engines, compared with transformers: tokens, log-probabilities, new weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_processor import write_processor

from mcore_rl.types import GenerationRequest, SamplingOptions
from mcore_rl.vision.placeholders import expanded
from mcore_rl.vision.positions import placeholders
from mcore_rl.vision.processor import ImageProcessor
from mcore_rl.weights.frozen import TrainedWeights
from model_converters.mapping.layout import TrainLayout
from tests.contract.engines import WITH_SGLANG, RemoteEngine
from tests.contract.hf_trainer import HFTrainer
from tests.exported import export_through
from tests.selection import needs_package, on_demand_unless
from tests.tiny_models import tiny_model, write_tiny_model
from tests.vision_models import SGLANG_TOWERS, SPECIAL, engine_sizes, png, vision_tokenizer

IMAGE, _, START, END = SPECIAL.values()
PROMPTS = (
    ([5, 6, START, IMAGE, END, 7, 8], [png(24, 16)]),
    ([9, 10, 11], []),
    ([START, IMAGE, END, 12, START, IMAGE, END, 13], [png(16, 16, 1), png(16, 32, 2)]),
)
ANSWER = ([START, IMAGE, END, 14, 15], [png(32, 16, 3)])
"""Answer of a tool, which follows the first prompt and its response."""
TOKENS = 10
FAMILIES_IN_VLLM = {
    "qwen3_vl": TrainLayout(2, tp=2),
    "qwen2_5_vl": TrainLayout(2, tp=2),
    "qwen3_vl_moe": TrainLayout(2, ep=2),
    "qwen3_5": TrainLayout(2, tp=2),
    "qwen3_5_moe": TrainLayout(2, ep=2),
}
"""Families with a vision tower that run in vLLM, and the trainer layout that exports the engine's first weights."""
COMBINATIONS = ("qwen3_vl_moe", "qwen3_5")
"""Families whose towers and layers are tested in other families too: the tower of qwen3_vl with the experts of a text
model, and the model of qwen3_5_moe without experts."""
FAMILIES_IN_SGLANG = ("qwen3_vl", "qwen2_5_vl")
pytestmark = needs_package("torchvision", "make setup")


def requests_of(directory: Path, sampling: SamplingOptions) -> list[GenerationRequest]:
    processor = ImageProcessor.load(directory, vision_tokenizer(), "model.hf_path")
    requests = []
    for number, (ids, files) in enumerate(PROMPTS):
        counts = [processor.num_features(file, "test") for file in files]
        tokens = expanded(np.array(ids, np.int32), IMAGE, counts, "test")
        images = processor.process(files, tokens, "test") if files else None
        requests.append(GenerationRequest(str(number), tokens, number, sampling, images=images))
    return requests


def later_turn(directory: Path, first: GenerationRequest) -> GenerationRequest:
    """The first request after a response, which contains a sampled placeholder, and the answer of a tool."""
    processor = ImageProcessor.load(directory, vision_tokenizer(), "model.hf_path")
    ids, files = ANSWER
    images = processor.process_images(files, "test")
    answer = expanded(np.array(ids, np.int32), IMAGE, [processor.num_placeholders(image) for image in images], "test")
    before = np.concatenate([first.token_ids, np.array([21, IMAGE, 22], np.int32)])
    assert first.images is not None
    known = first.images.followed_by(images, [len(before) + 1])
    return replace(first, request_id="later", token_ids=np.concatenate([before, answer]), images=known)


def reference(model: Any, request: GenerationRequest, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of transformers at each of the response's tokens, [T, V]."""
    ids = torch.tensor([[*request.token_ids.tolist(), *tokens]])
    inputs: dict[str, Any] = {}
    model.model.rope_deltas = None
    # Sampled placeholders are ordinary tokens; transformers would take them for images.
    sampled = ids == IMAGE
    if request.images is not None:
        sampled[0, placeholders(request.images, 2)] = False
    ids[sampled] = 0

    def embed_sampled(embedding: Any, _: object, embedded: torch.Tensor) -> torch.Tensor:
        return torch.where(sampled[..., None], embedding.weight[IMAGE], embedded)

    if request.images is not None:
        inputs = {
            "pixel_values": torch.from_numpy(request.images.pixels),
            "image_grid_thw": torch.from_numpy(request.images.grids).long(),
            "mm_token_type_ids": (ids == IMAGE).int(),
        }
    hook = model.get_input_embeddings().register_forward_hook(embed_sampled)
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, **inputs).logits[0]
    finally:
        hook.remove()
    return logits[len(request.token_ids) - 1 : -1].double().log_softmax(-1)


def check_images(engine: RemoteEngine, model: Any, version: int) -> None:
    """Compare greedy responses with transformers in float32."""
    requests = requests_of(engine.directory, SamplingOptions(TOKENS, temperature=0.0))
    done = engine.generate(requests)
    requests.append(later_turn(engine.directory, requests[0]))
    # The prefix of the first request, with its image, is in the engine's caches.
    done |= engine.generate(requests[-1:])
    gaps = []
    for request in requests:
        completion = done[request.request_id]
        assert completion.versions.tolist() == [version] * len(completion.token_ids)
        tokens = completion.token_ids.tolist()
        logp = reference(model, request, tokens)
        expected = logp.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()
        gaps.append(np.abs(completion.logp - expected))
        if engine.settings["dtype"] == "float32":
            assert logp.argmax(-1).tolist() == tokens
    if engine.settings["dtype"] == "float32":
        assert np.concatenate(gaps).max() < 5e-5
    else:
        # transformers' own bfloat16 model differs by 0.03 on average (update_checks.check_close).
        assert np.concatenate(gaps).mean() < 0.05


CASES = [
    *(
        pytest.param("vllm", each, id=f"vllm-{each}", marks=on_demand_unless(each not in COMBINATIONS))
        for each in FAMILIES_IN_VLLM
    ),
    *(
        pytest.param("sglang", each, id=f"sglang-{each}", marks=[WITH_SGLANG, *on_demand_unless(each == "qwen3_vl")])
        for each in FAMILIES_IN_SGLANG
    ),
]


@pytest.mark.parametrize(("process", "model_type"), CASES, indirect=["process"])
def test_vision_model_from_export_and_after_update_is_exact(
    process: RemoteEngine, model_type: str, tmp_path: Path
) -> None:
    saved, exported, sizes = tmp_path / "saved", tmp_path / "exported", engine_sizes(model_type)
    if process.kind == "sglang":
        sizes["vision_config"] |= SGLANG_TOWERS.get(model_type, {})
    write_tiny_model(saved, model_type, **sizes)
    export_through(saved, exported, FAMILIES_IN_VLLM[model_type])
    patch_size = sizes["vision_config"]["patch_size"]
    write_processor(exported, vision_tokenizer(), model_type, patch_size=patch_size)
    model = tiny_model(model_type, **sizes)
    # vLLM's kernels of gated delta nets compute in bfloat16 only.
    dtype = "bfloat16" if model_type.startswith("qwen3_5") else "float32"
    engine = process.start(exported, dtype=dtype, max_prompt_tokens=64)
    check_images(engine, model, 0)
    trainer = HFTrainer(model, engine, 40 << 10, 2)
    # The tower is updated, too: features of the earlier weights must not be used again.
    trainer.perturb(1)
    trainer.publish(1)
    check_images(engine, model, 1)
    assert trainer.certify() > 10
    # The engine holds the tower now, and the next update lacks it.
    trainer = HFTrainer(model, engine, 40 << 10, 2, trained=TrainedWeights(vision=False))
    trainer.perturb(2)
    trainer.publish(2, trainer.plan.first_trained_round)
    check_images(engine, model, 2)
    assert trainer.certify() > 10
