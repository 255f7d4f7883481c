"""Prompts in, batches out: sources, tokenizer, chat templates, the order of prompts, packing."""

from sat_jax.data.batching import make_batch, make_sft_batch, width_buckets
from sat_jax.data.pipeline import PromptStream, Ticket
from sat_jax.data.prompts import PromptOptions, PromptReport, PromptSet, load_prompts
from sat_jax.data.records import RouteLayout, Routes, Support, check_routes, check_support
from sat_jax.data.tokenizer import Tokenizer

__all__ = [
    "PromptOptions",
    "PromptReport",
    "PromptSet",
    "PromptStream",
    "RouteLayout",
    "Routes",
    "Support",
    "Ticket",
    "Tokenizer",
    "check_routes",
    "check_support",
    "load_prompts",
    "make_batch",
    "make_sft_batch",
    "width_buckets",
]
