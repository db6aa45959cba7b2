"""Progress of work in other processes, for the live screen. Nothing is polled in runs without a screen."""
