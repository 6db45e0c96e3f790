"""Stores: where claims, slots and run records are kept.

``protocols`` says what a store must do, ``memory`` and ``redis`` do it. Nothing here decides about
tasks, and nothing here imports Celery.
"""
