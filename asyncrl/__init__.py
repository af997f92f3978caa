"""asyncrl: asynchronous reinforcement learning of language models with a bounded staleness."""
