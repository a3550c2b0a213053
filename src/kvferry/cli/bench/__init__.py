"""``kvferry bench``: every way to move the same bytes between two processes, side by side in one run."""
