"""SGLang engine. SGLang has an environment of its own: `rank` and what it imports run there, everything else here."""
