"""Rules between configuration keys: conditions under which a part of a run exists, and contradictions."""
