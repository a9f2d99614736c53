"""Tests of the promises of trainer adapters on constructed rollouts: `farm doctor --adapter NAME`."""
