"""The page of a farm: batches, rollouts, transcripts and nodes in a browser, rendered on the server."""
