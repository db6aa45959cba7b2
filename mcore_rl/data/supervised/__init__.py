"""Conversations and pairs of responses as tokens, with the tokens that are trained."""
