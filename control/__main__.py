"""``python -m weightbus.control`` is ``weightbus``."""

import sys

from .cli import main

sys.exit(main())
