"""Construction of Megatron models: layers, attention, routers, names, loading, process groups."""

from mcore_rl.megatron import cpu

cpu.install()
