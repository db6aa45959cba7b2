"""Linear attention: Megatron's gated delta net for packed rows, and the layers of a model that have it."""

from mcore_rl.megatron import cpu

cpu.install()
