"""Chat messages and templates: normalization, rendering, multi-turn token ids, and checks of a template."""
