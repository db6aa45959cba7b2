"""A whole training step, compared with TRL."""
