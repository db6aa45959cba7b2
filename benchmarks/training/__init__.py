"""Updates, log-probabilities, losses and advantages."""
