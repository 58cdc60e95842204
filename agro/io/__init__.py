"""Files, JSON, numbers, text and functions of unknown origin: what every room reads and writes with."""
