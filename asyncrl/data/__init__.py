"""Prompts from parquet and jsonl files, in a seeded order."""

from .config import DataConfig, OverlongPrompts
from .prompts import PromptStream, load_eval_prompts

__all__ = ["DataConfig", "OverlongPrompts", "PromptStream", "load_eval_prompts"]
