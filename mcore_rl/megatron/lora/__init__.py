"""LoRA: adapter modules (adapters), and their initial values and merging into weights (weights)."""
