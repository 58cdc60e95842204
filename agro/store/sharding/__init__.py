"""A store in shards by prompt: several files or owners, which answer together as one store does."""
