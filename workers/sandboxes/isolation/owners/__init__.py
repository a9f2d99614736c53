"""File owners in sandboxes where the kernel knows one user: recorded and shown to programs. Standard library only."""
