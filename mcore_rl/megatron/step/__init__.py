"""A step of training: micro-batches, log-probabilities, the objective, replayed routing."""
