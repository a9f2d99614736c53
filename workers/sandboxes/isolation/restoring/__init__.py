"""Restoring of a layer: what loaders, interpreters and shells look at by themselves is the image's again."""
