"""Shared by vLLM's scheduler and workers: their messages, options, and the description of groups."""
