"""The web page of a farm: batches, rollouts, transcripts and nodes, rendered on the server."""
