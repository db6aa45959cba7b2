"""Models with a vision tower: the tower on the first pipeline stage, its features in the decoder, and the rotation by
positions in time, height and width."""

from mcore_rl.megatron import cpu

cpu.install()
