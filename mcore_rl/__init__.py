"""mcore-rl: reinforcement learning for large mixture-of-experts models on Megatron-Core."""

__version__ = "0.1.0"
