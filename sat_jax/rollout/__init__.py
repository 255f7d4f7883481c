"""Sampling engines, the queue between engine and learner, and the thread that connects them."""
