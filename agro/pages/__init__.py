"""Output for people: pages of a run, of several runs, of a store; verdicts, blind ratings, model cards."""
