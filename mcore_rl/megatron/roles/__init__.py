"""Models at work on a rank: actor, critic, reward model, reference."""
