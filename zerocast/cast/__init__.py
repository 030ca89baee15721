"""Casts: `plan.py` finds out once which rank owns which elements, `pipeline.py` runs the stages,
every step the same way.
"""

from zerocast.cast.plan import CastPlan

__all__ = ["CastPlan"]
