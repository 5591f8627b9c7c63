"""Answers to "Will it help me?": `explain` for models that people train, on clusters that they have."""
