"""Child processes: start, watch, exchange messages, and kill the process tree."""
