"""The door: programs that speak to OpenAI's or Anthropic's interfaces sample from a policy here, and each of
their calls becomes a sample."""
