"""Weight syncs between trainer ranks and engines."""
