"""What tests start and wait for: processes, servers, workers, and apps for them.

The launchers live in ``example_app``, since the demo starts the same things.
"""

from example_app.processes import Proc, ServiceUnavailable, remove_directory, short_directory, wait_until
from example_app.services import CeleryWorker, RedisServer, free_port, redis_binary
from tests.services.app import AppEnvironment, create_app, load_app
from tests.services.ending import end_worker

__all__ = [
    "AppEnvironment",
    "CeleryWorker",
    "Proc",
    "RedisServer",
    "ServiceUnavailable",
    "create_app",
    "end_worker",
    "free_port",
    "load_app",
    "redis_binary",
    "remove_directory",
    "short_directory",
    "wait_until",
]
