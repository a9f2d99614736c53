"""Retention: what is removed of batches that ended long ago, and by which error whoever asks for it is told."""
