"""``kvferry doctor``: what this machine, or the way between two of them, is like for moving caches.

The edge looks and measures (``observe``, ``probe``, ``calling``) and writes down what it has seen (``seen``).
Checks are pure: from what was seen to diagnoses, each with a cure.
"""
