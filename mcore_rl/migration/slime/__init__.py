"""Translation of slime's arguments."""
