"""Models on Megatron ranks: actor, critic, reward model and reference."""
