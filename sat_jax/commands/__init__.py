"""One module a family of `sat-jax` commands; each command is a typed function that tyro can call."""
