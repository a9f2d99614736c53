"""One worker process: its event loop, its leases, its watchdog, and the warm pool that it fills."""
