"""A run's disk: its folder and lock, its lines, its checkpoints, and reading all of that back."""
