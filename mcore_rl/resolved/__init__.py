"""What the configuration asks of model and ranks, each fact resolved in one place. Imports no Megatron."""
