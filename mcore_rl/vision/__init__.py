"""Images of prompts: reading, processing, placeholders, and positions of their tokens."""
