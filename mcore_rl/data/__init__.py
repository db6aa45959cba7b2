"""Prompt sets, tokenizers, the resumable prompt sampler, batches, packing and load balancing."""
