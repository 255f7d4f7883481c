"""``sat-jax``: one file a command."""
