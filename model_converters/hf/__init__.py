"""Hugging Face directories: tensors in and out, FP8, adapters, what lies beside the weights."""
