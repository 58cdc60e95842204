"""Placement: which processes a run has, where they run, and who starts them again when they die; and the
collector, which samples for a run that another process trains."""
