"""Statistics of results: intervals, paired and sequential tests, blind ratings, off-policy estimates."""
