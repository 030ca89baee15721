"""A format under a name that is not its own."""

from squarecast.fp8_square import build as build  # noqa: PLC0414
