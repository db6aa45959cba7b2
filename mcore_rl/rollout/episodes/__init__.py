"""Episodes: what is sampled for one prompt in one or more turns, with tools, users or environments in between."""
