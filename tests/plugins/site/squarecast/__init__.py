"""A package of a third party: a format, a backend and a host for zerocast, and some that are wrong."""
