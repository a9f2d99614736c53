"""The remote runtime of SWE-ReX on borrowed sandboxes: each is one of its servers, below its id or name.

A session is a shell of the sandbox. Responses have the form that the package's own client reads.
"""
