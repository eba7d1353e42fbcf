"""What every room may use: collectives, atomic writes, memory, half to float32, the C compiler's loader."""

import dinomamba

dinomamba.check_modules()  # what is started by -m from a folder with files of somebody else's is told so too
