"""Collectives with errors that name their caller (`group.py`); checks across ranks
(`agreement.py`).
"""
