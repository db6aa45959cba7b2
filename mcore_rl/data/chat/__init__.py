"""Conversations of several turns as tokens: what is new after a sampled message, and what a chat template can do."""
