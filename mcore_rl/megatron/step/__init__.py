"""Computation of a training step: micro-batches, log-probabilities, objective, router replay."""

from mcore_rl.megatron import cpu

cpu.install()
