"""Runs code that a model wrote: confined, limited, and gone when it is over."""
