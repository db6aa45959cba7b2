"""Optimizer, its state and offloading, and gradient norms."""

from mcore_rl.megatron import cpu

cpu.install()
