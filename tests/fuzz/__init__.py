"""Coverage-guided fuzzing of everything that reads bytes which somebody else has written: ``make fuzz``."""
