"""Measurements. `make bench` runs them all; each module says what it writes."""
