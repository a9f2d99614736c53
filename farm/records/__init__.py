"""Plain data that crosses the farm's boundaries: requests, rollouts, trajectories, engines. No database access."""
