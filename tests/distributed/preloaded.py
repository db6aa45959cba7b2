"""Imports and set-up that all ranks need, done once by the fork server.

No backward pass may run here: torch rejects one in a fork of a process that has already run one.
"""

from __future__ import annotations

import gc
import importlib

import torch

from mcore_rl.megatron.cpu.kernels.norm import rms_norm

for _name in (
    "mcore_rl.megatron.roles.actor",
    "megatron.core.dist_checkpointing",
    "megatron.core.optimizer",
    "model_converters.hf.loader",
    "torch._dynamo",  # the first optimizer step imports it
):
    importlib.import_module(_name)

with torch.no_grad():  # the first kernel of a process initializes numba's type system
    rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)
gc.freeze()  # otherwise every rank would copy the objects above when it collects garbage
