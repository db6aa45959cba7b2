"""Weight knowledge: how HF checkpoints and megatron-core models name, fuse and divide the same tensors.

Imports torch and safetensors' file format only; nothing of mcore_rl.
"""
