"""The door: an HTTP server with OpenAI's and Anthropic's interfaces that samples from a policy and stores
each call as a sample."""
