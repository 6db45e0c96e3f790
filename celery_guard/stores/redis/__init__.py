"""The store on one Redis or Valkey server, 6.2 or later.

All of redis-py is behind this package. ``RedisStore`` has one module for each caller: ``claims``
(dispatch), ``executions`` (workers), ``operators`` (people); ``link`` does the I/O, ``connect``
reads addresses, and every verb is one script in ``lua/``.
"""

from celery_guard.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
