"""LoRA: adapter modules (adapters), and their initial values and merging into weights (weights)."""

from mcore_rl.megatron import cpu

cpu.install()
