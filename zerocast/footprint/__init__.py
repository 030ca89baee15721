"""Footprint: what a model will take in bytes a rank and bytes a step, before there is any machine to train it on.

Parameters are made on the meta device and laid out by the functions that training uses (`zerocast.formats.layout`,
`zerocast.optim.bucket`, `zerocast.optim.masters`), so padding and bucket sizes are those of a run. Activations and what the
allocator and the communication library keep for themselves are left out.
"""

from zerocast.footprint.footprint import Footprint, Setup, footprint
from zerocast.footprint.shapes import PRESETS, Parameter, model_parameters, read_model

__all__ = ["PRESETS", "Footprint", "Parameter", "Setup", "footprint", "model_parameters", "read_model"]
