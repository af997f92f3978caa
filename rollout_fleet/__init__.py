"""rollout_fleet."""
