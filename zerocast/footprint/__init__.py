"""Footprint: the bytes of a model on each rank and in each step, without a machine to train it.

Parameters are laid out by the functions that training uses (`zerocast.formats.layout`,
`zerocast.distributed.bucket`, `zerocast.distributed.row_shards`), so padding and bucket sizes equal
those of a run. None of them imports torch. Activations and the reserves of the allocator and the
communication library are not included.
"""
