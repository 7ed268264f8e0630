"""High-water marks tried out: what a chain of sockets drops, delays and holds, measured and planned; and a doctor."""
