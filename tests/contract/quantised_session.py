"""An engine with quantised weights, and the model that it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_rl.types import GenerationRequest, SamplingOptions
from tests.contract.engines import RemoteEngine, start_engine
from tests.contract.hf_trainer import HFTrainer
from tests.tiny_models import VOCABULARY, tiny_model


class Session:
    """An engine that starts with random weights, and its model.

    keys: of rollout. std: of the model's weights. bucket: bytes, so that a layer spans several buckets.
    """

    def __init__(
        self,
        directory: Path,
        family: str,
        sizes: dict[str, Any],
        keys: dict[str, Any],
        *,
        quantization: str,
        std: float,
        bucket: int,
    ) -> None:
        self.directory, self.family, self.sizes, self.keys = directory, family, sizes, keys
        self.std, self.bucket = std, bucket
        self.model(seed=99).save_pretrained(directory)
        self.engine = start_engine("vllm", directory, "bfloat16", load_weights=False, quantization=quantization, **keys)

    def model(self, seed: int) -> Any:
        return tiny_model(self.family, seed=seed, std=self.std, **self.sizes).to(torch.bfloat16)

    def trainer(self, seed: int) -> HFTrainer:
        return HFTrainer(self.model(seed), self.engine, self.bucket, 2)


def logp_gaps(engine: RemoteEngine, model: Any) -> np.ndarray:
    """Return the differences between log-probabilities of sampled tokens in the engine and in `model`, in nats."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, VOCABULARY, size=12).astype(np.int32) for _ in range(6)]
    requests = [GenerationRequest(str(i), prompt, i, SamplingOptions(20)) for i, prompt in enumerate(prompts)]
    gaps = []
    for name, completion in engine.generate(requests).items():
        ids = torch.from_numpy(np.concatenate([prompts[int(name)], completion.token_ids]).astype(np.int64))
        with torch.no_grad():
            logp = model(ids[None]).logits[0, 11:-1].log_softmax(-1)
        gaps.append(logp.gather(1, ids[12:, None])[:, 0].numpy() - completion.logp)
    return np.concatenate(gaps)
