"""Memory layouts of caches: parts, orders, tiles, pages, and the share of one rank.

Used by descriptions from a model's config (``models``) and from an engine's tensors (``integrations``).
"""
