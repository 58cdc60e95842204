"""What a run would do and cost, before it starts."""
