"""Driver work per step: batches, packing, plan."""
