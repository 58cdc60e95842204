"""The version of agro-rl."""

__version__ = "0.1.0"
