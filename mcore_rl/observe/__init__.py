"""Output of a run: metrics, TensorBoard, timeline, progress and the final table."""
