"""Training. Read `loop.py` first; `step.py` has the only backward pass."""
