"""Prompts in, batches out: sources, tokenizer, chat templates, the order of prompts, packing."""
