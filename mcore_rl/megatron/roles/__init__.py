"""Models on Megatron ranks: actor, critic, reward model and reference."""

from mcore_rl.megatron import cpu

cpu.install()
