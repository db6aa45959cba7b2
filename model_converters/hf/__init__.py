"""Hugging Face model directories: reading and writing of tensors, FP8, LoRA adapters and non-weight files."""
