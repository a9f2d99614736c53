"""The persistent Python of a sandbox: interpreters forked from zygotes, and Jupyter kernels."""
