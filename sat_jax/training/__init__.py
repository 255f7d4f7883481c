"""One run: its parts built from the configuration, and the shell that owns every thread, clock, file and counter."""
