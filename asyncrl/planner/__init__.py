"""What other options would do: scenarios, the simulation of a run, and advice."""
