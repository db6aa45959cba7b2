"""Messages of a weight sync as differences from the previous update."""
