"""``python -m zmq_datasource``."""

from zmq_datasource.cli import main

if __name__ == "__main__":
    main()
