"""The objectives, one file per family."""
