"""Conversion of weights between Hugging Face checkpoints and Megatron-Core models: names, fusion and sharding.

The package imports torch only. Conversion and logit comparison also import mcore_rl.megatron, inside functions.
"""
