"""Connectors for inference engines."""
