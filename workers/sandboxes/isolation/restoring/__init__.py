"""Restore the files of a layer that loaders, interpreters and shells read by themselves to those of the image."""
