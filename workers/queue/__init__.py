"""The Celery side of a worker: its app, its three tasks, the message filter, the shutdown signals."""
