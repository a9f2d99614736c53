"""Peers and raw operations that the farm is compared with, in the same run."""
