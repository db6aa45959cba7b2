"""The optimizer, its state, where that lies, and gradients' norms."""
