"""Tiny models whose multi-token-prediction layer often predicts the next token, as trained layers do.

    python -m benchmarks.rollout.draft_model DIR

changes the weights of a checkpoint with one such layer: in the model and in the layer, the next token depends mostly on
the last one. Drafts of random layers are hardly ever accepted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CONTEXT_SHARE = 0.3
"""Factor of what attention and experts add to the hidden state of the last token."""


def make_predictable(directory: Path) -> None:
    """Change the weights of a checkpoint in one file so that its multi-token-prediction layer often predicts it."""
    config = json.loads((directory / "config.json").read_text())
    prefix, path = f"model.layers.{config['num_hidden_layers']}.", directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensor * (0.0 if name.startswith(prefix) else CONTEXT_SHARE)
    hidden = config["hidden_size"]
    # The layer's output is the normalised embedding of the last token, without the hidden state of the model.
    tensors[f"{prefix}eh_proj.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    tensors[f"{prefix}enorm.weight"] = torch.ones(hidden)
    tensors[f"{prefix}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})


if __name__ == "__main__":
    make_predictable(Path(sys.argv[1]))
