"""Input and output for all rooms: files, JSON, numbers, text, and functions of unknown origin."""
