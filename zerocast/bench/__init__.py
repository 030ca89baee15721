"""Two benchmarks: of a cast against a memory copy, and of a whole training step against bf16 and
other libraries.

`zerocast bench` and `zerocast bench step` are their command lines. README.md describes the
quantities and the method. Workloads, rows, measurements and reports are plain values. Memory is
allocated only while a row is measured, one row at a time.
"""
