"""A simulated cluster in virtual time: the real store and dispatcher, with nodes that only simulate rollouts."""
