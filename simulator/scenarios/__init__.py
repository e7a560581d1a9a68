"""Scripted scenarios without rng: commands, and a transcript of all that follows from each."""
