"""What both processes use: what they tell each other, and what both must understand in the same way."""
