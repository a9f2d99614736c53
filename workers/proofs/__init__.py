"""Proofs of the scorers: each scores a submission that is known to be right, and one that is known to be wrong."""
