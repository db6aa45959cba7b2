"""mcore-rl: reinforcement learning for large mixture-of-experts models on Megatron-Core."""

import gc

# Imports of torch, Megatron and vLLM make a million objects that stay, and with Python's default the collector goes
# through them again and again: an eighth of every start.
gc.set_threshold(100_000)

__version__ = "0.1.0"
