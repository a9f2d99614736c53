"""Well-known agent programs, unmodified: each is a `Harness`, which says what it is made of and how it is started."""
