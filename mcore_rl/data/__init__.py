"""Prompt sets, tokenizers, the resumable sampler, batches, packing and balancing."""
