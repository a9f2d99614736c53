"""Parts of the run and eval stages that only some handlers ask for: steps of a task, the layer a policy left."""
