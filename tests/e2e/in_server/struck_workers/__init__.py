"""Inside a server of deaths.py: its workers stop at the places at which they are to be struck (strikes.py).

SGLang imports what SGLANG_EXTERNAL_MODEL_PACKAGE names in every worker, as a package of more models; this one has none.
"""

import os
from pathlib import Path

from tests.e2e import strikes

strikes.watch(os.environ["STRUCK_AS"], Path(os.environ["STRUCK_IN"]), strikes.WorkersGate)
