"""LoRA: adapter modules, their initial values, and merging into weights."""

from mcore_rl.megatron import cpu

cpu.install()
