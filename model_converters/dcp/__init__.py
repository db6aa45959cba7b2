"""Megatron-Core distributed checkpoints (torch.distributed.checkpoint, DCP): writing, reading and verification."""
