"""Live weight sync: trainer ranks write converted slices into shared buckets, engines load them from there."""
