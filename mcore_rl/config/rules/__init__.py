"""When a run has a part, such as a judge, and what of its keys contradicts the rest."""
