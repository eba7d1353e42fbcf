"""Which runs a table, a figure, the demo or the study needs, and how they are started and reused."""

import common  # noqa: F401  # first: no file of somebody else's is in the place of a package
