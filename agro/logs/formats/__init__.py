"""Formats of logs that are read without another package: their table, and how each is read."""
