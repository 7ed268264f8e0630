"""What the machine and its surroundings give: file systems by their URI, object storage, open files, addresses,
signals, and log lines at a bounded rate.
"""
