"""``kvferry status``: what running engines are doing, once or again and again.

``command`` is what people call; ``asking`` asks, ``reported`` is what one engine said, ``watched`` what all of
them said over time, ``board`` which tables that makes; ``watch`` draws them, ``printing`` shows one answer whole.
"""
