"""Runnable examples of zerocast; README.md lists them."""
