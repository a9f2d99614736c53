"""The promises of trainer adapters, tried on constructed rollouts: `farm doctor --adapter NAME`."""
