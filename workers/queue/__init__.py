"""The Celery side of a worker: its app, its three tasks, the filter of messages, the signals that end it."""
