"""Verification: compare the live bytes of weights with an unsharded cast of their masters."""
