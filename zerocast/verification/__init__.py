"""The live bytes of weights against an unsharded cast of their gathered masters; `verify.py` is the call."""
