"""The cases that oracles are asked about, written down or drawn."""
