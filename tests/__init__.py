"""The CPU test suite; README.md says how it is built."""
