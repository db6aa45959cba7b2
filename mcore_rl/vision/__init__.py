"""Images of prompts: positions of their tokens."""
