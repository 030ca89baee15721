"""The tile shapes of blocked formats: whole blocks in both directions, a few thousand elements, as compile-time constants."""

from dataclasses import dataclass

from zerocast.formats import FormatSpec

_WIDEST = 256


@dataclass(frozen=True)
class TileShape:
    """A tile of `height` x `width` elements, and how many of them, one below the other, make up a program's `band`."""

    fmt: FormatSpec
    height: int
    width: int
    steps: int

    @staticmethod
    def of(fmt: FormatSpec, elements: int = 4096) -> "TileShape":
        """One tile of so many elements a program; its height divides a block's, or is a multiple of it."""
        assert fmt.block
        own = fmt.columnwise_block or (1, 1)
        height = max(fmt.block[0], own[0])
        width = max(fmt.block[1], own[1], min(_WIDEST, elements // height))
        height = min(height, elements // width)
        return TileShape(fmt, height, width, 1)

    @staticmethod
    def for_amaxes(fmt: FormatSpec, elements: int = 4096) -> "TileShape":
        """As many tiles a program as make up whole blocks."""
        assert fmt.block
        shape = TileShape.of(fmt, elements)
        return TileShape(fmt, shape.height, shape.width, max(1, fmt.block[0] // shape.height))

    @property
    def band(self) -> int:
        """Rows of a program."""
        return self.height * self.steps

    def constants(self) -> dict[str, int]:
        """What the kernels are compiled with; an absent grid has no rows."""
        assert self.fmt.block
        own = self.fmt.columnwise_block or (0, 0)
        return {
            "HEIGHT": self.height,
            "STEPS": self.steps,
            "WIDTH_A": self.width,
            "ROWS_A": self.fmt.block[0],
            "COLUMNS_A": self.fmt.block[1],
            "OWN_ROWS": own[0],
            "OWN_COLUMNS": own[1],
        }
