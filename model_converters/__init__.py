"""Conversion of weights between Hugging Face checkpoints and Megatron-Core models: names, fusion and sharding.

The package imports neither transformers nor mcore_rl, except that conversion and logit comparison import
mcore_rl.megatron inside functions.
"""
