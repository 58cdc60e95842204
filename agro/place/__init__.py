"""Placement: the processes of a run, where they run, and the supervisor that restarts them; and the
collector, which samples for a run that another process trains."""
