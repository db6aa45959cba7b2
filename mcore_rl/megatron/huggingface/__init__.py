"""Training of transformers' own models (strategy fsdp2). Their chunks are built by model.build_model."""

from mcore_rl.megatron import cpu

cpu.install()
