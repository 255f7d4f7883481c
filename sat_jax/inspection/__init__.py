"""A batch dumped by any trainer under a loss, and the clip geometry of that loss."""
