"""vLLM servers as an engine: token ids in, token ids and log-probabilities out, new weights after each step."""
