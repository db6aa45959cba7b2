"""Distributed checkpoints, written during training and readable in any other layout."""

from mcore_rl.megatron import cpu

cpu.install()
