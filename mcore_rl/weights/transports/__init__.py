"""Ways by which buckets of weights reach engines; each owns the order of writing and reading."""
