"""Protection of a run's ports from other users of the host: torch's stores and gloo accept anyone who connects."""
