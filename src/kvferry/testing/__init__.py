"""Shared parts of kvferry's tests, shipped for yours: the oracle, strategies, small engines."""
