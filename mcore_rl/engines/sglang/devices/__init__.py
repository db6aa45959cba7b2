"""Devices of SGLang's ranks: CPUs and GPUs, and the memory that a rank releases during sleep."""
