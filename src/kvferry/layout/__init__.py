"""How a cache lies in memory: parts, orders, tiles, pages, and what one rank holds of them.

Everything that makes views uses this room: descriptions from a model's config (``models``) and from an
engine's own tensors (``integrations``). Nothing here knows of configs or of tensors.
"""
