"""Notices and status over HTTP."""
