"""Tiny models with a multi-token-prediction layer, and the drafts that transformers computes from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from mcore_rl.engines.noise import noise_keys, sample_tokens
from tests.contract.engines import DIVIDED_BY_TWO, LATENT
from tests.contract.hf_trainer import HFTrainer
from tests.tiny_models import add_mtp_layer, tiny_model
from tests.unit.weights.delivery import Tensors

SIZES = {"glm4_moe": DIVIDED_BY_TWO, "deepseek_v3": DIVIDED_BY_TWO | LATENT}
LAYERS = 2
PREFIX = f"model.layers.{LAYERS}."
"""Prefix of the multi-token-prediction layer's tensors."""


def write_draft_model(directory: Path, family: str, *, seed: int = 3, predicts: bool = False) -> Path:
    """Write a model with a multi-token-prediction layer.

    predicts: the layer often predicts the model: in both, the next token depends mostly on the last one.
    """
    model = tiny_model(family, seed=seed, num_hidden_layers=LAYERS, **SIZES[family])
    if predicts:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    parameter.mul_(0.3)
    model.save_pretrained(directory)
    add_mtp_layer(directory, seed=seed)
    if predicts:
        tensors = load_file(directory / "model.safetensors")
        save_file(tensors | _without_context(tensors), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _without_context(tensors: Tensors) -> Tensors:
    """Return tensors of a layer whose output is the normalised embedding of the last token."""
    changed = {
        name: torch.zeros_like(tensor)
        for name, tensor in tensors.items()
        if name.startswith(PREFIX) and ("o_proj" in name or "down_proj" in name)
    }
    hidden = len(tensors["model.norm.weight"])
    changed[f"{PREFIX}eh_proj.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    changed[f"{PREFIX}enorm.weight"] = torch.ones(hidden)
    changed[f"{PREFIX}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    return changed


class CheckpointTrainer(HFTrainer):
    """Trainer whose model is the directory of a checkpoint, and whose weights are the checkpoint's tensors."""

    def tensors(self) -> Tensors:
        return load_file(self.model / "model.safetensors")


class DraftOracle:
    """Drafts of a checkpoint, computed by transformers from complete sequences."""

    def __init__(self, directory: Path, scratch: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._tensors = load_file(directory / "model.safetensors")
        self._model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").float().eval()
        # transformers has no such layers: read it as one more decoder layer.
        shutil.copytree(directory, scratch)
        config = json.loads((directory / "config.json").read_text())
        config |= {"num_hidden_layers": LAYERS + 1, "num_nextn_predict_layers": 0}
        (scratch / "config.json").write_text(json.dumps(config))
        longer = AutoModelForCausalLM.from_pretrained(scratch, attn_implementation="eager").float().eval()
        self._layer, self._config = longer.model.layers[LAYERS], longer.config
        # vLLM's models of the family return the hidden states before or after the norm for the next draft token.
        self._normalised = config["model_type"] == "deepseek_v3"

    @torch.no_grad()
    def draft(self, tokens: list[int], num_tokens: int, seed: int, temperature: float) -> list[int]:
        """Return the draft after `tokens`."""
        hidden = self._model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        embedded = self._model.model.embed_tokens(torch.tensor(tokens[1:]))
        embedded[0] = 0  # vLLM masks the embedding at position 0
        rows, drafts = self._project(embedded, hidden), []
        for place in range(num_tokens):
            states = self._through_layer(rows)[-1:]
            normalised = self._norm(states, "shared_head.norm")
            logits = self._model.lm_head(normalised)
            if temperature:
                keys = noise_keys([seed], np.array([len(tokens) + place]))
                drafts.append(int(sample_tokens((logits / temperature).softmax(-1), keys)))
            else:
                drafts.append(int(logits.argmax()))
            embedded = self._model.model.embed_tokens(torch.tensor(drafts[-1:]))
            rows = torch.cat([rows, self._project(embedded, normalised if self._normalised else states)])
        return drafts

    def _project(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")], dim=1)
        return both @ self._tensors[f"{PREFIX}eh_proj.weight"].T

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        scale = (rows.square().mean(-1, keepdim=True) + self._config.rms_norm_eps).rsqrt()
        return rows * scale * self._tensors[f"{PREFIX}{name}.weight"]

    def _through_layer(self, rows: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(len(rows))[None]
        mask = torch.full((1, 1, len(rows), len(rows)), -torch.inf).triu(1)
        rotations = self._model.model.rotary_emb(rows[None], positions)
        result = self._layer(rows[None], attention_mask=mask, position_ids=positions, position_embeddings=rotations)
        return (result[0] if isinstance(result, tuple) else result)[0]
