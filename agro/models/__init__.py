"""Models: policy, reference, chat templates, encoding, adapters, log-probs."""
