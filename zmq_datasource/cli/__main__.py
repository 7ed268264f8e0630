"""``python -m zmq_datasource.cli``."""

from zmq_datasource.cli import main

if __name__ == "__main__":
    main()
