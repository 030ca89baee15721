"""The last import of the server of the ranks: no garbage collection of a rank looks at what the server has, and so copies it."""

from tests.workers import freeze_modules

freeze_modules()
