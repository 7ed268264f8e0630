"""``python -m benchmarks``."""

if __name__ == "__main__":
    # Here, because every child process imports this module too and needs none of it.
    from benchmarks.run import main

    main()
