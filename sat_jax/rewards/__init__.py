"""What a response is worth: verifiers, and the worker processes that run them."""
