"""``python -m weightbus.control`` is ``weightbus``."""

import sys

from .cli.main import main

sys.exit(main())
