"""The values that cross every edge of the farm: requests, rollouts, trajectories, engines; plain data, no database."""
