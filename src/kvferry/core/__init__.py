"""The pure core: what a cache is, what a transfer is, and the proof that it is right.

Standard library and numpy only; no I/O, no clock. Read in this order: ``state`` (what a cache is made
of), ``view`` (where its cells sit), ``manifest`` (an engine's description, and ``compare``), ``plan``
(who sends what), ``prove`` (the laws; ``overlap`` decides who shares a byte), ``lower`` (bytes, once per
peer), ``select`` (runs, per request).
"""
