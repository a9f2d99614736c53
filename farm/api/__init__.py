"""The farm over HTTP.

All state is in the store: any number of API processes may run, and each may be killed any time.
"""
