"""kvferry inside other people's engines."""
