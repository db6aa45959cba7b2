"""Generation: engines behind one protocol, the worker that scores what they produce, and the collector."""
