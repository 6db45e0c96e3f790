"""How a worker ends when its test is over."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from example_app.processes import Proc

WARM_LIMIT = 8.0


def end_worker(worker: Proc) -> None:
    """Kill a worker and its children.

    A warm shutdown may take half a minute when a task has just ended, so it is not waited for; except
    under coverage, where a killed process takes its data with it, and then not for long.
    """
    if worker.running and "COVERAGE_PROCESS_CONFIG" in os.environ:
        worker.kill(signal.SIGTERM)
        with suppress(TimeoutError):
            worker.wait(WARM_LIMIT)
    worker.close()
