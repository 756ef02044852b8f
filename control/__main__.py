"""``python -m weightbus.control`` is ``weightbus``."""

import sys

from .cli.entry_point import main

sys.exit(main())
