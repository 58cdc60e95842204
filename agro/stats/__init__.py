"""Statistics of results: intervals, paired tests, off-policy estimates."""
