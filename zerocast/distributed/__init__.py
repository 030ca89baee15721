"""Collectives whose errors name their caller (`group.py`), and checks across ranks."""
