"""The one shared truth: everything a second process has to agree with. Stdlib and pydantic only."""
