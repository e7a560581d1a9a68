"""Scripted scenarios without chance: commands, and a transcript of all that follows from each."""
