"""For tests that run a real vLLM: models small enough for a CPU."""
