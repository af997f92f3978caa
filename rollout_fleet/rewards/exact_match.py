"""Rewards a response that says exactly the ground truth."""

from asyncrl.protocol.types import Prompt


def exact_match(prompt: Prompt, response_text: str) -> float:
    """Return 1.0 if ``response_text`` (special tokens removed) equals the prompt's ground truth, else 0.0."""
    return 1.0 if response_text == prompt.ground_truth else 0.0
