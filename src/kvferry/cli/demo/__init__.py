"""``kvferry demo``: real bytes between engines of different shape, every cell checked by name.

``command`` is what people call; ``pairs`` says which engines are shown and ``samples`` which requests;
``in_memory`` and ``between_processes`` move and check them; ``result`` is what both find out, ``printing``
shows it.
"""
