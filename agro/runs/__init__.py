"""What a run leaves and shows: its folder, terminal, trackers, watchdog, plan, model card and upload."""
