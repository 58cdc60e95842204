"""Training. Read `loop.py` first; `step.py` holds the only backward."""
