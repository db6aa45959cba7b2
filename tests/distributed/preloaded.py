"""Imported by the server that ranks fork from: what each of them would import and set up for itself.

No backward pass may run here: torch refuses one in a fork of a process that has had one.
"""

from __future__ import annotations

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

with torch.no_grad():  # the first kernel of a process makes numba collect what it knows of types
    rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)
