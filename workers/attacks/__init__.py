"""Attacks on rewards: submissions that ask for a reward without the work, by the data source that they are made for."""
