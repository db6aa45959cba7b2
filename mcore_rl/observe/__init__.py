"""What a run tells its owner: metrics, trackers, timeline, progress and the final table."""
