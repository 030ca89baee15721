"""States on disk: checkpoints, and masters from files of other programs."""
