"""A soak: every path under load for a long time, in weather, and what its processes hold meanwhile."""
