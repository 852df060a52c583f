"""The training step, what it trains with, and what saves its memory."""
