"""What every room may use: collectives, atomic writes, half to float32, the C compiler's loader."""
