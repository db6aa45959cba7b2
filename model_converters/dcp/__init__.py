"""Megatron-Core's distributed checkpoints: written, read, verified."""
