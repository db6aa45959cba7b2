"""Facts about models and ranks, each derived from the configuration in one place. Does not import Megatron."""
