"""The door to SGLang, which lives in an environment of its own: `rank` runs there, everything else here."""
