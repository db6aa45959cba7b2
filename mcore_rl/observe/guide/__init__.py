"""Guide to the main metrics: healthy ranges, thresholds of warnings, and remedies. The log, the report and
docs/metrics.md use the entries of `table`."""
