"""Placement: which processes a run has, where they run, and who starts them again when they die."""
