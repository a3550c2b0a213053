"""``kvferry status``: what running engines are doing, once or again and again.

``command`` is what people call; ``asking`` asks, ``reported`` is what one engine said, ``watched`` what all
said over time, ``board`` which tables that makes; ``watch`` draws them, ``page`` serves them to a browser,
``printing`` shows one answer whole.
"""
