"""Ranks: each collective as one call (`group.py`), and what all ranks must have alike (`agreement.py`)."""
