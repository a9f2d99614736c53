"""One node: the supervisor of its worker processes, and what is prepared and cleaned up there."""
