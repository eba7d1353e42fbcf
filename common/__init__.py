"""What every room may use: collectives, atomic writes, memory, half to float32, the C compiler's loader."""
