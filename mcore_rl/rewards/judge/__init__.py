"""Language models as judges: questions, answers, and scores."""
