"""The owners of files, where the kernel knows one user of a sandbox: noted and shown; standard library only."""
