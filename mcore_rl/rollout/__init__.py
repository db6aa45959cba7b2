"""Generation: the engine loop, episodes and tools, grading of responses, and collection of groups."""
