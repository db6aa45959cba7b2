"""Which rows an epoch draws, and in which order, where it is not each of them once: weights, a curriculum."""
