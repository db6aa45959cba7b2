"""Loss of the trained tokens of a micro-batch, from their log-probabilities."""
