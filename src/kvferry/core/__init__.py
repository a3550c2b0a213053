"""The pure core: descriptions of caches, plans of transfers, and their proofs.

Standard library and numpy only; no I/O, no clock. Read in this order: ``state`` (the arrays of a cache),
``view`` (cell addresses), ``manifest`` (an engine's description, and ``compare``), ``plan`` (the pieces per
source rank), ``prove`` (the laws; ``overlap`` finds shared bytes), ``lower`` (byte patterns, once per peer),
``select`` (runs, per request).
"""
