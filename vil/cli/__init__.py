"""Command-line programs: training and validation."""
