"""What the machine gives: file systems by their URI, open files, and log lines at a bounded rate."""
