"""Engine loop, episodes and routing of requests."""
