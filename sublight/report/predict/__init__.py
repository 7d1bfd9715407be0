"""Predictions for people: the terminal, rows for JSON and CSV, one HTML page."""
