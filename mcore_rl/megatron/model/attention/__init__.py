"""Self-attention of packed rows with torch's kernels, on one rank and over context-parallel ranks."""

from mcore_rl.megatron import cpu

cpu.install()
