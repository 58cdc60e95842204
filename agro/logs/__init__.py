"""Logs of other programs: recognizing formats, importing their records into a store, and their scores."""
