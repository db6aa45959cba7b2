"""Episodes: the responses to one prompt in one or more turns, with tools, users or environments in between."""
