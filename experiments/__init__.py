"""Which runs a table, a figure, the demo or the study needs, and how they are started and reused."""
