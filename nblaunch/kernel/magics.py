"""`%load_ext nblaunch`."""

from __future__ import annotations

import os
from typing import Any

from nblaunch.kernel import agents


def start_agent(shell: Any) -> None:
    """Start the agent now; it imports torch while the user reads on. Returns at once.

    Args:
        shell: IPython's shell, as `load_ipython_extension` gets it; it is not changed.
    """
    agents.get(os.environ)
