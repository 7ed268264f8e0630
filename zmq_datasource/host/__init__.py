"""What the machine provides: directories by URI, addresses, processes, signals, and log lines at a limited rate."""
