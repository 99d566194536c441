"""``python -m gpumem_magic`` is the command ``gpumem``."""

import sys

from gpumem_magic.cli import main

if __name__ == "__main__":
    sys.exit(main())
