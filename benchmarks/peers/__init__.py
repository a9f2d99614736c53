"""Peers and raw operations that the farm is measured beside, in the same run."""
