"""What a run leaves and shows: its folder, metrics, problems, terminal and trackers."""
