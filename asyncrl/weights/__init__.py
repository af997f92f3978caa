"""How a policy version reaches the engines: its manifest, and the ways in which its bytes travel and are verified."""
