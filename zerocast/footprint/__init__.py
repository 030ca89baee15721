"""Footprint: the bytes of a model on each rank and in each step, without a machine to train it.

Parameters are created on the meta device and laid out by the functions that training uses
(`zerocast.formats.layout`, `zerocast.optim.bucket`), so padding and bucket sizes are those of a
run. Activations and the reserves of the allocator and the communication library are not included.
"""
