"""Tries to raise each hard limit; prints those that could be raised."""

import resource

for name in dir(resource):
    if name.startswith("RLIMIT_"):
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        try:
            if hard != resource.RLIM_INFINITY:
                resource.setrlimit(number, (hard + 1, hard + 1))
                print(name)
        except (ValueError, OSError):
            pass
